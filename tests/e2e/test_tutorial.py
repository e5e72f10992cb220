"""docs/tutorial.md, followed to the letter in an empty directory: every command, and every line of output that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.transcripts import DOCS, follow, steps, user_environment

PAGE = DOCS / "tutorial.md"


def test_every_command_shows_what_the_page_says() -> None:
    assert len(list(steps(PAGE))) >= 12 and all(line for _, shown in steps(PAGE) for line in shown)


@pytest.mark.long
def test_followed_to_the_letter(tmp_path: Path) -> None:
    environment = user_environment()
    for command, shown in steps(PAGE):
        follow(command, shown, tmp_path, environment)
