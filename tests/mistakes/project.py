"""A small project as a user has one, and a mistake in it: how it is spoilt, what is typed, what the answer must say."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oppo_megatron.cli.main import main
from oppo_megatron.data.tokenizer import train_sentencepiece
from tests.support.commands import TEXTS
from tests.support.hf import save_tiny
from tests.support.rows import write_rows
from tests.support.runs import write_run

TRAIN = """\
run_dir: runs/new
seed: 7
steps: 4
placement: {mode: single}
tokenizer: {path: t.model}
data: {path: prompts.jsonl, max_prompt_tokens: 20}
actor: {checkpoint: actor, optimizer: {lr: 1.0e-5}}
critic: {checkpoint: actor}
reward: {checkpoint: reward}
rewards: [{kind: model}, {kind: verifier, name: arithmetic, weight: 0.5}]
rollout: {batch_size: 8, max_response_tokens: 20}
ppo: {minibatches: 2}
overlap: {delta: {rule: fixed, initial: 2, max: 4}}
"""
SFT = """\
run_dir: runs/sft
tokenizer: {path: t.model}
data: {path: completions.jsonl}
model: {checkpoint: actor}
batch_size: 4
max_tokens: 64
"""
RM = SFT.replace("runs/sft", "runs/rm").replace("completions", "pairs")
SERVE = "rewards: [{kind: verifier, name: arithmetic}]\n"
REWARDS = '''\
def short(prompt, response, fields):
    """Short answers are good."""
    return -float(len(response))
'''


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in the folder; contextlib has this from Python 3.11 on."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def build(folder: Path) -> None:
    train_sentencepiece(TEXTS, folder / "t.model", 300)
    for name, head in (("actor", "lm"), ("reward", "scalar")):
        save_tiny(folder / name, "llama", head, vocab_size=304, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    for name, row_of in {
        "prompts": lambda n: {"answer": str(2 * n)}, "completions": lambda n: {"completion": f" it is {2 * n}"},
        "pairs": lambda n: {"chosen": f" it is {2 * n}", "rejected": f" it is {n}"},
    }.items():  # fmt: skip
        write_rows(folder / f"{name}.jsonl", *({"prompt": f"{n}+{n}="} | row_of(n) for n in range(24)))
    for name, text in (
        ("train.yaml", TRAIN), ("sft.yaml", SFT), ("rm.yaml", RM), ("serve.yaml", SERVE), ("my_rewards.py", REWARDS),
    ):  # fmt: skip
        (folder / name).write_text(text)
    write_run(folder / "runs" / "done")
    with inside(folder):
        assert main(["train", "train.yaml", "run_dir=runs/ppo", "steps=2"]) == 0
        assert main(["sft", "sft.yaml", "run_dir=runs/tuned", "steps=2"]) == 0
    shutil.copytree(folder / "runs" / "ppo", folder / "runs" / "cut")
    (folder / "runs" / "cut" / "summary.json").unlink()
    shutil.rmtree(folder / "runs" / "cut" / "weights")


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


Edit = Callable[[Path], object]
"""An edit in the project's folder."""

PPO, VALIDATE = ("train", "train.yaml"), ("validate", "train.yaml")
JOB = ("launch", "slurm", "train.yaml", "--out", "job.sbatch")


@dataclass(frozen=True)
class Mistake:
    """`says`: words with the wrong value and the remedy; after `mends` (edits of the project), typing `then` succeeds."""

    name: str
    typed: Sequence[str]
    says: Sequence[str]
    then: Sequence[str] = VALIDATE
    spoils: Sequence[Edit] = ()
    mends: Sequence[Edit] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def write(name: str, text: str | bytes) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def replace(name: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old!r}: the case is out of date"
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


def remove(name: str) -> Edit:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def cut(name: str, num_bytes: int) -> Edit:
    """Leave the first bytes of a file, as an interrupted copy does."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def copy(name: str, to: str) -> Edit:
    def edit(folder: Path) -> None:
        source = folder / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / to)

    return edit


def setting(name: str, wrong: str, right: str, *says: str, command: str = "train") -> Mistake:
    return Mistake(name, (command, f"{command}.yaml", wrong), says, ("validate", f"{command}.yaml", right))
