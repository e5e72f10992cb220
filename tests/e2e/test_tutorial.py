"""docs/tutorial.md, followed to the letter in an empty directory: every command, and every line of output that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
TOLD_TO_STOP = 124  # of `timeout`
NUMBER = re.compile(r"-?\d[\d.]*(?:e-?\d+)?k?")


def steps() -> Iterator[tuple[str, list[str]]]:
    """Each command of the page with the lines that are shown below it; `...` stands for any lines."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, [line for line in shown if line.strip() not in ("", "...")]


def masked(line: str) -> str:
    """Without numbers, times and spaces, which differ from machine to machine; an equal line says the same thing."""
    return " ".join(NUMBER.sub("N", re.sub(r"ETA \S+ ", "", re.sub(r"host \S+", "host", line))).split())


def test_every_command_shows_what_the_page_says() -> None:
    assert len(list(steps())) >= 12 and all(line for _, shown in steps() for line in shown)


@pytest.mark.long
def test_followed_to_the_letter(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    for command, shown in steps():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == (TOLD_TO_STOP if command.startswith("timeout") else 0), f"{command}\n{done.stdout}"
        lines = iter([masked(line) for line in done.stdout.splitlines()])
        for line in shown:
            assert masked(line) in lines, f"`{command}` does not show, in this order: {line}\n{done.stdout}"
