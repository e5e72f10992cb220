"""docs/tutorial.md and docs/hh.md, followed to the letter: every command, and every line of output that the pages show."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.transcripts import CTRL_C, DOCS, follow, masked, steps, user_environment

TUTORIAL, HH = DOCS / "tutorial.md", DOCS / "hh.md"
OTHER_ENGINE = "engine/bin/"
"""An environment with CTranslate2 next to the dialogues; OPPO_ENGINE names one."""


def said(line: str) -> str:
    """A policy's answer begins with a space, as HH's answers do; its words differ from machine to machine."""
    return "an answer" if line.startswith(" ") and line.strip() and not line.startswith("  ") else masked(line)


def test_every_command_of_the_tutorial_shows_its_output() -> None:
    assert len(list(steps(TUTORIAL))) >= 12 and all(line for _, shown in steps(TUTORIAL) for line in shown)


def test_hh_goes_the_whole_way() -> None:
    commands = [command for command, _ in steps(HH)]
    words = [tuple(command.split()[:2]) for command in commands]
    way = ["config", "tokenizer", "sft", "rm", "train", "report", "eval", "generate"]
    assert [word for word in way if ("oppo", word) in words] == way
    assert any(CTRL_C in shown for _, shown in steps(HH)) and any("--resume" in command for command in commands)
    assert any(command.startswith("python ") for command in commands)
    assert any(command.startswith(OTHER_ENGINE) for command in commands)


@pytest.mark.long
def test_the_tutorial_followed_to_the_letter(tmp_path: Path) -> None:
    environment = user_environment()
    for command, shown in steps(TUTORIAL):
        follow(command, shown, tmp_path, environment)


@pytest.mark.long
def test_hh_followed_to_the_letter(shared_data: Path, tmp_path: Path) -> None:
    dialogues = shared_data / "hh_helpful_train_subset.jsonl"
    if not dialogues.is_file():
        pytest.skip(f"no {dialogues}: put 3000 of HH's helpful pairs there")
    shutil.copy(dialogues, tmp_path / "hh.jsonl")
    engine, environment = os.environ.get("OPPO_ENGINE"), user_environment()
    if engine:
        (tmp_path / "engine").symlink_to(engine)
    for command, shown in steps(HH):
        if engine or not command.startswith(OTHER_ENGINE):
            follow(command, shown, tmp_path, environment, said)
