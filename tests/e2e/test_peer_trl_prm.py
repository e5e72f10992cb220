"""The loss of `oppo prm` against TRL's PRMTrainer, where its environment has been made and the tokens of steps agree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.comparison import PEER_PYTHON
from oppo_megatron.config.data import DataConfig, TokenizerConfig
from oppo_megatron.config.supervised import ProcessRewardModelConfig
from oppo_megatron.data.arithmetic import Shape, write_steps
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.train.supervised import run_supervised
from tests.support.hf import save_tiny
from tests.support.tokenizers import save_byte_level

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{completion}\n"
"""TRL writes a separator behind the last step too."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / PEER_PYTHON).is_file(),
        reason=f"no {PEER_PYTHON}: `make bench-trl` creates it; TRL is installed for comparisons only",
    ),
]


def asked(tokenizer: Path, model: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What TRL makes of the rows."""
    command = [str(ROOT / PEER_PYTHON), str(ROOT / "tests" / "e2e" / "trl_prm.py"), str(tokenizer), str(model)]
    found = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_the_loss_is_that_of_two_logits_on_the_same_tokens(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "steps.jsonl", seed=3, count=12, shape=Shape(max_operations=4))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [row["prompt"] + "\n".join(row["completions"]) for row in rows]
    tokenizer = save_byte_level(tmp_path / "tokenizer", texts)
    model = tmp_path / "model"
    save_tiny(model, "qwen2", "scalar", vocab_size=320)
    theirs = asked(tokenizer, model, rows)

    data = {"path": path, "completion_template": TEMPLATE}
    loader = RowLoader(DataConfig(**data), load_tokenizer(TokenizerConfig(path=tokenizer)), 120, Quarantine())
    ours = loader.steps("\n")
    assert [[*row.prompt, *row.completion[:-1]] for row in ours] == theirs["tokens"], "but for our EOS"
    for row, labels in zip(ours, theirs["labels"], strict=True):
        ends = [len(row.prompt) + end for end in row.ends]
        assert ends == [place for place, label in enumerate(labels) if label != -100]
        assert row.labels == [labels[end] for end in ends]

    settings = {
        "run_dir": tmp_path / "run", "batch_size": len(rows), "max_tokens": 120, "tokenizer": {"path": tokenizer},
        "data": data, "model": {"checkpoint": model}, "runtime": {"device": "cpu", "threads_per_rank": 1},
        "logging": {"console": "off"}, "checkpoint": {"final": "nothing"},
    }  # fmt: skip
    run_supervised(ProcessRewardModelConfig.model_validate(settings))
    (line,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_steps_that_are_tokenized_apart_have_other_tokens(tmp_path: Path) -> None:
    """Where a token holds the end of a step and its separator, TRL trains on tokens that no policy writes."""
    texts = ["so it is 1.\nso it is 2.\nso it is 3.\n"] * 4
    tokenizer = save_byte_level(tmp_path / "tokenizer", texts, over_words=True)
    model = tmp_path / "model"
    save_tiny(model, "qwen2", "scalar", vocab_size=320)
    row = {"prompt": "Q", "completions": ["so it is 1.", "so it is 2."], "labels": [True, False]}
    (theirs,) = asked(tokenizer, model, [row])["tokens"]
    together = load_tokenizer(TokenizerConfig(path=tokenizer)).encode("Qso it is 1.\nso it is 2.\n")
    assert theirs != together
