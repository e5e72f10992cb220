"""Pages of docs/ that show a terminal session (```console: `$ ` begins a command), followed to the letter.
`...` stands for any lines, and `^C` for Ctrl-C, pressed once the line above it has come."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

DOCS = Path(__file__).resolve().parents[2] / "docs"
CTRL_C = "^C"
TOLD_TO_STOP = 75
NUMBER = re.compile(r"[+-]?\d[\d.]*(?:e-?\d+)?k?")
CLOCK = re.compile(r"ETA \S+ |-clock-\d+")


def steps(page: Path) -> Iterator[tuple[str, list[str]]]:
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            length = lines.index("END") + 1 if "<<'END'" in lines[0] else 1
            yield "\n".join(lines[:length]), [line for line in lines[length:] if line.strip() not in ("", "...")]


def masked(line: str) -> str:
    return " ".join(NUMBER.sub("N", CLOCK.sub("", re.sub(r"host \S+", "host", line))).split())


def user_environment() -> dict[str, str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    return environment


def follow(
    command: str, shown: list[str], folder: Path, environment: Mapping[str, str], said: Callable[[str], str] = masked
) -> None:
    """Give the command in `folder`; AssertionError where it fails or does not print the shown lines in order, `said` the same."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a group of its own, as a terminal makes it for each command
    )
    printed: list[str] = []
    lines = _lines(process, printed)
    try:
        for line in shown:
            if line == CTRL_C:
                os.killpg(process.pid, signal.SIGINT)
            else:
                wanted = said(line)
                assert any(said(other) == wanted for other in lines), _missing(command, line, printed)
        for _ in lines:
            pass
    except AssertionError:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    code = process.wait()
    assert code == (TOLD_TO_STOP if CTRL_C in shown else 0), f"`{command}` ended with {code}\n{''.join(printed)}"


def _lines(process: subprocess.Popen[str], printed: list[str]) -> Iterator[str]:
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        printed.append(line)
        yield line.rstrip("\n")


def _missing(command: str, line: str, printed: list[str]) -> str:
    return f"`{command}` does not show, in this order: {line}\n{''.join(printed)}"
