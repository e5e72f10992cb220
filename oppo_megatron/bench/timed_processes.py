"""Processes with a time limit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from oppo_megatron.processes import started


def run_within(command: Sequence[str], seconds: float, log: Path) -> Generator[str | None, None, None]:
    """Runs a command with its output in `log`, and yields None each second; at its end why it has not done all, where it has not.

    What it has started ends with it, in sessions of their own too: nothing of it may hold the device's memory.
    """
    with started(command, log, end=_end) as process:
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            yield None
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        ended = process.poll()
    if ended is None:
        yield f"its {seconds:.0f} s were over"
    elif ended:
        yield f"exit code {ended}, {_last_line(log)} ({log})"
    else:
        yield None


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
