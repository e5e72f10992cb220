"""Reports why a rank ended to the process that started it."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

FOLDER = "OPPO_FAILURES"
"""Environment variable: where a rank that `oppo` has started leaves its `Failure`."""
CALLS = ".calls"
WELL = ".ended"
EXIT_STALLED = 2  # as every error that is no defect


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    input: what the user can correct.  defect: an error of ours, `message` is its traceback.  symptom: a peer did not come.
    stall: the run stood still, `message` says who did not move.
    """

    rank: int
    time_s: float
    kind: Literal["input", "defect", "symptom", "stall"]
    message: str

    def leave(self, folder: Path) -> None:
        """A rank may leave one of each kind: its watchdog's is another than that of its main thread.  Appears whole."""
        path = folder / f"{self.rank}.{self.kind}.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.replace(path)


def ended_well(rank: int, folder: Path) -> None:
    """A rank says so at its end."""
    (folder / f"{rank}{WELL}").touch()


def read_failures(folder: Path) -> Iterator[Failure]:
    """What the ranks have left."""
    for path in sorted(folder.glob("*.json")):
        yield Failure(**json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def noted(rank: int, what: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """While the block calls a user's code, a file says so: native code may end the process, and nothing else would tell.

    Where nobody would read the file, a crash has the stack written to stderr, with the user's line.
    """
    if FOLDER not in environment:
        with _stack_on_crash():
            yield
        return
    path = Path(environment[FOLDER]) / f"{rank}{CALLS}"
    path.write_text(what, encoding="utf-8")
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def _stack_on_crash() -> Iterator[None]:
    if faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
        return
    faulthandler.enable(sys.__stderr__, all_threads=False)
    try:
        yield
    finally:
        faulthandler.disable()


def ended_within(folder: Path) -> dict[int, str]:
    """What each rank had called and has not come back from."""
    return {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob(f"*{CALLS}")}


def end_stalled(rank: int, command: str, message: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """End this process at once: its main thread may be in a call that nothing can interrupt."""
    if FOLDER in environment:
        Failure(rank, time.time(), "stall", message).leave(Path(environment[FOLDER]))
    else:
        label = f" [rank {rank}]" if "RANK" in environment or "SLURM_PROCID" in environment else ""
        print(f"oppo {command}{label}: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)
