"""Configurations of `oppo config --init arithmetic` train, by the commands that it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main

SHORT = {
    "sft": ["steps=2", "batch_size=4"],
    "train": [
        "steps=2", "rollout.batch_size=4", "rollout.max_response_tokens=16", "overlap.delta={initial: 2, max: 2}",
        "placement.mode=single", "evaluation.data.max_rows=4",
    ],
}  # fmt: skip


def test_the_commands_that_it_prints_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--init", "arithmetic"]) == 0
    told = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line)[1:] for line in told[told.index("next:") + 1 :]]
    assert [words[0] for words in commands] == ["tokenizer", "sft", "validate", "train", "train"]
    for words in commands:
        assert main([*words, *SHORT.get(words[0], [])]) == 0, words
    steps = [json.loads(line)["step"] for line in Path("runs/ppo/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert Path("runs/ppo/weights/actor/model.safetensors").is_file()
