"""Records of why ranks ended, for their launcher."""

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

import psutil

FOLDER = "OPPO_FAILURES"
"""Environment variable: folder for failures of ranks that `oppo` started."""
CALLS = ".calls"
WELL = ".ended"
EXIT_STALLED = 2  # as every error that is not a defect


@dataclass(frozen=True)
class Failure:
    """`input`: the user can correct it; `defect`: a traceback; `symptom`: a peer did not come; `stall`: names a stalled rank."""

    rank: int
    time_s: float
    kind: Literal["input", "defect", "symptom", "stall"]
    message: str

    def leave(self, folder: Path) -> None:
        """Write it atomically; watchdog and main thread may write one each."""
        path = folder / f"{self.rank}.{self.kind}.json"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.replace(path)


def ended_well(rank: int, folder: Path) -> None:
    (folder / f"{rank}{WELL}").touch()


def ended_silently(folder: Path) -> bool:
    """True if a rank with a process id in `folder` has ended and left no record: the system killed it, or the user's code."""
    known = {path.name.partition(".")[0] for path in folder.iterdir() if path.suffix in (WELL, ".json")}
    ids = [path.read_text(encoding="utf-8") for path in folder.glob("*.pid") if path.stem not in known]
    return not all(runs(int(number)) for number in ids if number)


def runs(pid: int) -> bool:
    """False for a process that is gone, or has ended and whose parent has not asked for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_failures(folder: Path) -> Iterator[Failure]:
    for path in sorted(folder.glob("*.json")):
        yield Failure(**json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def noted(rank: int, what: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Keep a file during a user's code, which may end the process silently; without a launcher, a crash writes its stack."""
    if FOLDER in environment:
        path = Path(environment[FOLDER]) / f"{rank}{CALLS}"
        path.write_text(what, encoding="utf-8")
        try:
            yield
        finally:
            path.unlink()
    elif faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
    else:
        faulthandler.enable(sys.__stderr__, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()


def ended_within(folder: Path) -> dict[int, str]:
    """Return the user's call that each rank ended in."""
    return {int(path.stem): path.read_text(encoding="utf-8") for path in folder.glob(f"*{CALLS}")}


def end_stalled(rank: int, command: str, message: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """End at once: the main thread may be in a call that cannot be interrupted."""
    if FOLDER in environment:
        Failure(rank, time.time(), "stall", message).leave(Path(environment[FOLDER]))
    else:
        label = f" [rank {rank}]" if "RANK" in environment or "SLURM_PROCID" in environment else ""
        print(f"oppo {command}{label}: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)
