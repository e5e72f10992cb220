"""docs/hh.md, followed to the letter in a directory that holds the raw dialogues: from pairs to a policy in three engines."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.transcripts import CTRL_C, DOCS, follow, masked, steps, user_environment

PAGE = DOCS / "hh.md"
OTHER_ENGINE = "engine/bin/"
"""An environment with CTranslate2 beside the dialogues; OPPO_ENGINE names one."""


def said(line: str) -> str:
    """What a policy answers begins with a space, as HH's answers do; its words differ from machine to machine."""
    return "an answer" if line.startswith(" ") and line.strip() and not line.startswith("  ") else masked(line)


def test_the_page_goes_the_whole_way() -> None:
    commands = [command for command, _ in steps(PAGE)]
    words = [tuple(command.split()[:2]) for command in commands]
    way = ["config", "tokenizer", "sft", "rm", "train", "report", "eval", "generate"]
    assert [word for word in way if ("oppo", word) in words] == way
    assert any(CTRL_C in shown for _, shown in steps(PAGE)) and any("--resume" in command for command in commands)
    assert any(command.startswith("python ") for command in commands)
    assert any(command.startswith(OTHER_ENGINE) for command in commands)


@pytest.mark.long
def test_followed_to_the_letter(shared_data: Path, tmp_path: Path) -> None:
    dialogues = shared_data / "hh_helpful_train_subset.jsonl"
    if not dialogues.is_file():
        pytest.skip(f"no {dialogues}: put 3000 of HH's helpful pairs there")
    shutil.copy(dialogues, tmp_path / "hh.jsonl")
    engine = os.environ.get("OPPO_ENGINE")
    if engine:
        (tmp_path / "engine").symlink_to(engine)
    environment = user_environment()
    for command, shown in steps(PAGE):
        if engine or not command.startswith(OTHER_ENGINE):
            follow(command, shown, tmp_path, environment, said)
