"""Commands that are typed wrong, and what an environment says."""

from __future__ import annotations

from tests.mistakes.mistake import Mistake, setting, write

REWARD = "rewards=[{kind: model}, {kind: python, entry_point: 'my_rewards:short'}]"
FUNCTION = ("validate", "train.yaml", REWARD)


def _function(name: str, body: str, *says: str) -> Mistake:
    return Mistake(
        name, ("train", "train.yaml", REWARD), ("my_rewards", *says), FUNCTION,
        spoils=[write("my_rewards.py", body)],
        mends=[write("my_rewards.py", "def short(prompt, response, fields):\n    return -float(len(response))\n")],
    )  # fmt: skip


COMMANDS: tuple[Mistake, ...] = (
    Mistake("a command misspelt", ("vaildate", "train.yaml"), ("vaildate", "validate")),
    Mistake("no command", (), ("COMMAND",)),
    Mistake("no configuration", ("train",), ("CONFIG.yaml",)),
    Mistake("an option with an underscore", ("train", "train.yaml", "--dry_run"), ("--dry_run", "--dry-run"),
            ("train", "train.yaml", "--dry-run")),
    Mistake("an option of another command", ("validate", "train.yaml", "--resume"), ("--resume",)),
    Mistake("a negative number of restarts", ("train", "train.yaml", "--max-restarts", "-1"), ("-1", "at least 0")),
    Mistake("restarts in words", ("train", "train.yaml", "--max-restarts", "two"), ("two",)),
    Mistake("a benchmark misspelt", ("bench", "overlp", "train.yaml"), ("overlp", "overlap"), ("bench", "--help")),
    Mistake("a case misspelt", ("config", "--init", "arithmetik"), ("arithmetik", "arithmetic"), ("config", "--init")),
    Mistake("a key misspelt in a question", ("config", "train.yaml", "--explain", "overlap.detla"), ("overlap.delta",),
            ("config", "train.yaml", "--explain", "overlap.delta")),
    Mistake("a report of no run", ("report", "runs"), ("runs",), ("report", "runs/done", "--out", "page", "--no-png")),
    Mistake("a report of a folder that is not there", ("report", "runs/dnoe"), ("runs/dnoe",),
            ("report", "runs/done", "--out", "page", "--no-png")),
    Mistake("watching no run", ("report", "runs/nothing", "--watch"), ("runs/nothing",), ("report", "runs/done", "--watch")),
    Mistake("a generator of rounds that is none", ("plan", "schedule", "train.yaml", "--generator", "wowen"), ("wowen", "woven"),
            ("plan", "schedule", "train.yaml", "--generator", "sequential")),
    Mistake("a conversion of nothing", ("convert", "aktor", "out", "--to", "hf"), ("aktor",), ("convert", "--help")),
    Mistake("a conversion onto itself", ("convert", "actor", "actor", "--to", "hf"), ("actor",), ("convert", "--help")),
    Mistake("a conversion to a format that is none", ("convert", "actor", "out", "--to", "gguf"), ("gguf",),
            ("convert", "--help")),
    Mistake("a service of a run's file", ("serve", "sft.yaml"), ("sft.yaml",), ("validate", "serve.yaml")),
    Mistake("a job without a partition's file", ("launch", "slurm", "tain.yaml"), ("tain.yaml",),
            ("launch", "slurm", "train.yaml", "--out", "job.sbatch")),
    Mistake("a job on a machine of another name", ("launch", "pbs", "train.yaml"), ("pbs", "slurm"),
            ("launch", "slurm", "train.yaml", "--out", "job.sbatch")),
)  # fmt: skip

FUNCTIONS: tuple[Mistake, ...] = (
    setting("a module that is not there", "rewards=[{kind: model}, {kind: python, entry_point: 'my_reward:short'}]",
        REWARD, "my_reward"),
    setting("a function that is not there", "rewards=[{kind: model}, {kind: python, entry_point: 'my_rewards:shrot'}]",
        REWARD, "shrot"),
    setting("a function without its module", "rewards=[{kind: model}, {kind: python, entry_point: 'short'}]",
        REWARD, "module:function"),
    setting("a function's path as a file", "rewards=[{kind: model}, {kind: python, entry_point: 'my_rewards.py'}]",
        REWARD, "module:function"),
    _function("a module with an error of syntax", "def short(prompt, response, fields)\n    return 0.0\n", "my_rewards.py:1"),
    _function("a module that imports what is not there", "import numpyy\n", "numpyy"),
    _function("a module that fails", "short = 1 / 0\n", "division by zero"),
    _function("a name that is no function", "short = 3\n", "short"),
    _function("a function of one argument", "def short(response):\n    return 1.0\n", "short"),
)  # fmt: skip

ENVIRONMENT: tuple[Mistake, ...] = (
    Mistake("RANK without WORLD_SIZE", ("train", "train.yaml"), ("WORLD_SIZE",), variables={"RANK": "0"}),
    Mistake("a rank beyond the world", ("train", "train.yaml"), ("rank 2 of 1",),
            variables={"RANK": "2", "WORLD_SIZE": "1"}),
    Mistake("more ranks than the placement has", ("train", "train.yaml"), ("4", "1"),
            variables={"RANK": "0", "WORLD_SIZE": "4"}),
    Mistake("a device that is not there", ("train", "train.yaml", "runtime.device=cuda"), ("cuda",)),
    Mistake("a tracker that is not installed", ("train", "train.yaml", "logging.trackers=[wandb:mine]"), ("wandb",)),
    Mistake("a continued run with other prompts", ("train", "train.yaml", "--resume", "run_dir=runs/done"), ("runs/done",)),
)  # fmt: skip
