"""A small project as a user has one: weights, a tokenizer, data, configurations, runs: ended, interrupted, of `oppo sft`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from oppo_megatron.cli.main import main
from oppo_megatron.data.tokenizer import train_sentencepiece
from tests.support.hf import save_tiny
from tests.support.runs import write_run

TEXTS = [f"what is {n} plus {n}? it is {2 * n} = + - * 0123456789" for n in range(60)]

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
RM = """\
run_dir: runs/rm
tokenizer: {path: t.model}
data: {path: pairs.jsonl}
model: {checkpoint: actor}
batch_size: 4
max_tokens: 64
"""
SERVE = """\
rewards: [{kind: verifier, name: arithmetic}]
"""
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
    numbers = range(24)
    _write_rows(folder / "prompts.jsonl", [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in numbers])
    _write_rows(folder / "completions.jsonl", [{"prompt": f"{n}+{n}=", "completion": f" it is {2 * n}"} for n in numbers])
    _write_rows(
        folder / "pairs.jsonl", [{"prompt": f"{n}+{n}=", "chosen": f" it is {2 * n}", "rejected": f" it is {n}"} for n in numbers]
    )
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


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
