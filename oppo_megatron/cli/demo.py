"""`oppo demo`: the whole chain on generated arithmetic, from data to a comparison of sequential training and OPPO."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.load import load_checked
from oppo_megatron.cli.measure import cuda_devices
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.evaluation import ACCURACY
from oppo_megatron.cores import has_cuda
from oppo_megatron.data.generated import DatasetSizes, Shape, misreported_solution, write_dataset
from oppo_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError
from oppo_megatron.layout.placements import world_size
from oppo_megatron.nesting import read_json
from oppo_megatron.report.charts import draw
from oppo_megatron.report.comparison import format_table
from oppo_megatron.report.curves import REWARD, curve_chart
from oppo_megatron.report.run_records import read_runs
from oppo_megatron.report.timeline import draw_windows, step_window
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import iter_json_lines

RECORD = "stage.json"
OUT = Path("runs/demo")
CONFIGS = Path("examples/arithmetic")
OWN = ("ppo", "online_dpo")
"""Presets with their own configuration file; the others change the preset of grpo.yaml."""
RUNS = {"sequential": False, "oppo": True}
"""The two runs, and whether each overlaps."""

DATA: dict[str, Any] = {
    "sizes": {"sft": 20000, "pairs": 4000, "prompts": 8000, "heldout": 1000},
    "imperfect": 0.6,
    "shape": {"max_operations": 16, "scale": 1.5, "tail": 1.5, "max_operand": 5, "largest": 15},
}
VOCAB_SIZE = 284
TOKENIZER_ROWS = 2000

QUICK_DATA: dict[str, Any] = {**DATA, "sizes": {"sft": 400, "pairs": 200, "prompts": 200, "heldout": 20}}
QUICK_SHAPE = ["hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=64"]
QUICK = {
    "sft": ["steps=20", "batch_size=16", *(f"model.init.{size}" for size in QUICK_SHAPE)],
    "rm": ["steps=5", "batch_size=8"],
    "ppo": ["steps=5", "rollout.batch_size=8", "rollout.max_response_tokens=64", "overlap.delta={initial: 3, max: 3}"],
    "grpo": [
        "steps=3", "rollout.batch_size=16", "rollout.group_size=4", "rollout.max_response_tokens=64",
        "overlap.delta={initial: 1, max: 1}", "filter=null",
    ],
    "online_dpo": [
        "steps=3", "rollout.batch_size=16", "rollout.max_response_tokens=64", "overlap.delta={initial: 1, max: 1}",
    ],
}  # fmt: skip
"""Changes for `--quick`.  Group filters are off, because they would drop all groups of an untrained policy."""


@dataclass(frozen=True)
class Stage:
    """`make` returns an exit code. A finished stage is reused with the same `settings` and content of the stages in `after`."""

    name: str
    title: str
    directory: Path
    settings: Mapping[str, Any]
    make: Callable[[], int]
    after: Sequence[Stage] = ()

    @property
    def record(self) -> dict[str, Any] | None:
        """Content of the stage file; None if the directory is not a stage."""
        path = self.directory / RECORD
        if not path.is_file():
            return None
        try:
            record = read_json(path.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def finished(self) -> bool:
        """True if the directory can be reused."""
        record = self.record or {}
        return bool(record.get("finished")) and {key: record.get(key) for key in ("settings", "after")} == self._key()

    def run(self) -> int:
        """Make the stage in an empty directory; return the exit code. Raises ConfigError for foreign files."""
        if self.directory.exists():
            if self.record is None and any(self.directory.iterdir()):
                raise ConfigError(
                    f"{self.directory} has no {RECORD}, so this command did not write it and will not remove it; "
                    "choose another --out, or move it away"
                )
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)
        # A new identity each time forces later stages to be made again.
        record = {"identity": uuid.uuid4().hex, **self._key()}
        write_json(self.directory / RECORD, {**record, "finished": False})
        code = self.make()
        if code == 0:
            write_json(self.directory / RECORD, {**record, "finished": True})
        return code

    def _key(self) -> dict[str, Any]:
        after = {stage.name: (stage.record or {}).get("identity") for stage in self.after}
        return dict(json.loads(json.dumps({"settings": self.settings, "after": after}, default=str)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithm", choices=PRESETS, default="ppo", metavar="NAME", help=f"{', '.join(PRESETS)}; default: ppo")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {OUT}, with --algorithm {OUT}-NAME")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the data and of all training; default: 1")
    parser.add_argument("--quick", action="store_true", help="a tiny version: everything runs, little is learned")
    parser.add_argument("--fresh", action="store_true", help="make every stage again")
    parser.add_argument(
        "--configs", type=Path, metavar="DIR",
        help=f"folder of sft.yaml, rm.yaml, ppo.yaml, grpo.yaml, online_dpo.yaml; default: {CONFIGS}",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    algorithm = args.algorithm
    out = args.out or folder_of(OUT, algorithm)
    stages = plan(out, find_configs(args.configs, algorithm), args.seed, args.quick, algorithm)
    started = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow tiny models down
    try:
        for number, stage in enumerate(stages, start=1):
            title, began = f"[{number}/{len(stages)}] {stage.title}", time.monotonic()
            if stage.finished and not args.fresh:
                print(f"{title}: finished before, reused", flush=True)
                continue
            print(title, flush=True)
            code = stage.run()
            print(f"    {'not finished' if code else 'done'} after {time.monotonic() - began:.1f} s", flush=True)
            if code == EXIT_REQUEUE:  # stopped by a signal while training
                raise KeyboardInterrupt
            if code:
                return code

        write_report(out, list(RUNS), time.monotonic() - started, algorithm)
    except KeyboardInterrupt:
        print(f"\ninterrupted: finished stages in {out} are kept; the same command continues from there", flush=True)
        return EXIT_INTERRUPTED
    return 0


def folder_of(out: Path, algorithm: str) -> Path:
    return out if algorithm == "ppo" else out.with_name(f"{out.name}-{algorithm}")


def find_configs(given: Path | None, algorithm: str = "ppo") -> Path:
    """Return `given`, or the algorithm's folder in the working directory or repository. Raises ConfigError."""
    names = [f"{name}.yaml" for name in ("sft", *(["rm"] if algorithm == "ppo" else []), _file_of(algorithm))]
    places = [given] if given is not None else [CONFIGS, Path(__file__).parents[2] / CONFIGS]
    for place in places:
        if all((place / name).is_file() for name in names):
            return place
    raise ConfigError(
        f"no {', '.join(names[:-1])} and {names[-1]} in {' or '.join(map(str, places))}; run the demo from the repository's "
        "root, or name their folder with --configs"
    )


def _file_of(algorithm: str) -> str:
    return algorithm if algorithm in OWN else "grpo"


def plan(out: Path, configs: Path, seed: int, quick: bool, algorithm: str = "ppo") -> list[Stage]:
    """Only ppo trains a reward model; others have the verifier."""
    single = has_cuda() and cuda_devices() == 1
    recipe = {**(QUICK_DATA if quick else DATA), "seed": seed}
    make_data = functools.partial(_make_data, out / "data", recipe)
    data = Stage("data", "data: arithmetic problems with worked solutions", out / "data", recipe, make_data)
    make_tokenizer = functools.partial(_make_tokenizer, out / "tokenizer", out / "data")
    settings = {"vocab_size": VOCAB_SIZE, "rows": TOKENIZER_ROWS}
    tokenizer = Stage("tokenizer", "tokenizer: sentencepiece", out / "tokenizer", settings, make_tokenizer, [data])

    def training(kind: str, name: str, title: str, places: Mapping[str, Path], after: Sequence[Stage]) -> Stage:
        file = configs / f"{_file_of(algorithm) if kind == 'train' else kind}.yaml"
        changes = [f"seed={seed}", *(QUICK[file.stem] if quick else [])]
        if kind == "train":
            changes += [] if algorithm == "ppo" else [f"algorithm.preset={algorithm}"]
            if single:
                changes.append("placement.mode=single")
            elif algorithm != "ppo" and PRESETS[algorithm].kl["mode"] == "none":
                changes.append("placement.actor.dp=2")
            changes += [f"overlap.{kind}={str(RUNS[name]).lower()}" for kind in ("intra", "inter")]
        elif not single:
            changes.append("parallel.dp=2")
        paths = {"run_dir": out / name, "tokenizer.path": out / "tokenizer" / "tokenizer.model", **places}
        make = functools.partial(_train, kind, file, [*changes, *(f"{key}={path}" for key, path in paths.items())])
        # Paths are left out, so a demo that was moved as a whole is still finished.
        settings = {"config": file.read_text(encoding="utf-8"), "changes": changes}
        return Stage(name, title, out / name, settings, make, [data, tokenizer, *after])

    sft_weights, rm_weights = out / "sft" / "weights", out / "rm" / "weights"
    before = [training("sft", "sft", "sft: warm start of the actor", {"data.path": out / "data" / "sft.jsonl"}, [])]
    places = {"data.path": out / "data" / "prompts.jsonl", "evaluation.data.path": out / "data" / "heldout.jsonl"}
    places["actor.checkpoint"] = sft_weights
    if algorithm == "ppo":
        pairs = {"data.path": out / "data" / "pairs.jsonl", "model.checkpoint": sft_weights}
        before.append(training("rm", "rm", "rm: reward model on right and wrong solutions", pairs, before[:]))
        places |= {"critic.checkpoint": rm_weights, "reward.checkpoint": rm_weights}
    sequential = training("train", "sequential", f"{algorithm}: sequential, no overlap", places, before)
    oppo = training("train", "oppo", f"{algorithm}: OPPO, both overlaps", places, before)
    return [data, tokenizer, *before, sequential, oppo]


def _make_data(directory: Path, recipe: Mapping[str, Any]) -> int:
    write_dataset(
        directory,
        recipe["seed"],
        DatasetSizes(**recipe["sizes"]),
        imperfect=recipe["imperfect"],
        flaw=misreported_solution,
        shape=Shape(**recipe["shape"]),
    )
    print("    " + ", ".join(f"{count} {name}" for name, count in recipe["sizes"].items()), flush=True)
    return 0


def _make_tokenizer(directory: Path, data: Path) -> int:
    path = directory / "tokenizer.model"
    pairs = list(iter_json_lines(data / "pairs.jsonl"))
    train_sentencepiece([row["prompt"] + row["chosen"] for row in pairs[:TOKENIZER_ROWS]], path, VOCAB_SIZE)
    tokenizer = load_tokenizer(TokenizerConfig(path=path))
    lengths = sorted(len(tokenizer.encode(row["chosen"])) + 1 for row in pairs)
    median, high = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
    write_json(directory / "lengths.json", {"median": median, "p99": high, "longest": lengths[-1]})
    print(
        f"    {VOCAB_SIZE} pieces; right solutions have {median} tokens in the median, {high} at the 99th percentile "
        f"({high / median:.1f} times as many)",
        flush=True,
    )
    return 0


def _train(kind: str, file: Path, overrides: Sequence[str]) -> int:
    config = load_checked(kind, file, overrides)
    return launch(kind, config, world_size(config))


FIGURES = (
    "step_s", "scoring_hidden", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "deferred",
)  # fmt: skip


def write_report(out: Path, names: Sequence[str], seconds: float, algorithm: str) -> None:
    """Write demo.json, reward.png and timeline.png of the runs `out/<name>`, the first without overlap."""
    runs = {name: RunDirectory(out / name) for name in names}
    figures = {name: _figures(run) for name, run in runs.items()}
    base, other = (figures[name]["step_s"] for name in names)
    lengths = read_json((out / "tokenizer" / "lengths.json").read_text(encoding="utf-8"))
    write_json(out / "demo.json", {"speedup": base / other, **figures, "solution_tokens": lengths})
    records = read_runs(list(runs.values()))
    if (reward := curve_chart(records, REWARD[0])) is not None:
        draw(reward).savefig(out / "reward.png")
    draw_windows({each.name: step_window(each.name, each.spans, None) for each in records}).savefig(out / "timeline.png")
    print(comparison(figures, base / other, algorithm))
    files = ", ".join(str(out / file) for file in ("reward.png", "timeline.png", "demo.json"))
    print(f"{files}; {seconds:.0f} s in all")


def comparison(figures: Mapping[str, Mapping[str, Any]], speedup: float, algorithm: str) -> str:
    """A column for each run, the first without overlap."""
    runs = list(figures.values())
    lines = {"seconds per step": [f"{run['step_s']:.2f}" for run in runs], "speed-up": ["1.00x", f"{speedup:.2f}x"]}
    if any(run["scoring_hidden"] is not None for run in runs):  # there is none without a scoring model
        lines["scoring time hidden"] = [f"{run['scoring_hidden']:.0%}" for run in runs]
    lines["rollouts by times deferred"] = [histogram(run["deferred"]) for run in runs]
    lines["reward, first to last steps"] = [f"{run['reward_first']:.2f} to {run['reward_last']:.2f}" for run in runs]
    for when in ("before", "after"):
        accuracies = [(run[f"accuracy_{when}"], run[f"error_{when}"]) for run in runs]
        lines[f"held-out accuracy {when}"] = [
            f"{mean:.1%}" + ("" if error is None else f" ± {error:.1%}") for mean, error in accuracies
        ]
    lines["difference from the first"] = ["", difference(*runs)]
    rows = [{"": label, **dict(zip(figures, values, strict=True))} for label, values in lines.items()]
    return "\n".join(
        [
            f"{algorithm.upper()} on arithmetic: the same start, the same steps",
            format_table({"": "", **{name: name for name in figures}}, rows),
            "±: standard error over the held-out problems; another seed changes an accuracy by more",
        ]
    )


def difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Difference of final accuracies, noise below two standard errors (of independent samples: an upper bound)."""
    change = other["accuracy_after"] - first["accuracy_after"]
    errors = [run["error_after"] for run in (first, other)]
    if None in errors:
        return f"{change:+.1%}"
    error = math.hypot(*errors)
    return f"{change:+.1%} ± {error:.1%}{', which is noise' if abs(change) < 2 * error else ''}"


def histogram(deferred: Mapping[str, int]) -> str:
    total = sum(deferred.values())
    return ", ".join(f"{times}: {count / total:.0%}" for times, count in deferred.items())


def _figures(run: RunDirectory) -> dict[str, Any]:
    summary = read_json(run.summary.read_text(encoding="utf-8"))
    errors = [line["error"][ACCURACY] for line in summary["heldout"].values()]
    return {name: summary[name] for name in FIGURES} | {"error_before": errors[0], "error_after": errors[-1]}
