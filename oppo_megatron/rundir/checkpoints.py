"""A run's checkpoints: `checkpoints/step-<steps>`, with `-clock-<decode steps>` within a step.

`.step-...` is renamed once complete; `.removed-...` is being removed; `.replaced-...` is renamed back if it has no successor.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from oppo_megatron.rundir.manifest import sync_folder

NAME = re.compile(r"step-(\d+)(?:-clock-(\d+))?")
ASIDE, REPLACED, REMOVED = ".", ".replaced-", ".removed-"


@dataclass(frozen=True, order=True)
class Position:
    """`step` steps are done; `clock`: within the next one, or -1."""

    step: int
    clock: int = -1

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}" + ("" if self.clock < 0 else f"-clock-{self.clock:08d}")

    @classmethod
    def of(cls, name: str) -> Position | None:
        match = NAME.fullmatch(name)
        position = None if match is None else cls(int(match[1]), -1 if match[2] is None else int(match[2]))
        return None if position is None or position.name != name else position


class CheckpointStore:
    """One rank makes and renames the folders in `root`."""

    def __init__(self, root: Path):
        self.root = root

    def positions(self) -> list[Position]:
        names = [path.name for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        # Include a replaced one whose successor is still unnamed: `recover` renames it back.
        found = {Position.of(name.removeprefix(REPLACED)) for name in names}
        return sorted(position for position in found if position is not None)

    def folder(self, position: Position) -> Path:
        return self.root / position.name

    def aside(self, position: Position) -> Path:
        return self.root / f"{ASIDE}{position.name}"

    def begin(self, position: Position) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        folder = self.aside(position)
        folder.mkdir()
        return folder

    def recover(self) -> None:
        """Rename replaced checkpoints back and remove incomplete ones."""
        for left in self.root.glob(f"{REPLACED}step-*"):
            whole = self.root / left.name.removeprefix(REPLACED)
            if not whole.exists():
                left.rename(whole)
        for left in self.root.glob(f"{ASIDE}*step-*"):
            if left.is_dir():
                shutil.rmtree(left)
        if self.root.is_dir():
            sync_folder(self.root)

    def abandon(self, position: Position) -> None:
        shutil.rmtree(self.aside(position), ignore_errors=True)

    def commit(self, position: Position) -> Path:
        """Name a checkpoint once on disk."""
        folder = self.folder(position)
        replaced = self.root / f"{REPLACED}{position.name}"
        if folder.exists():  # a resumed run has reached this position again
            folder.rename(replaced)
        self.aside(position).rename(folder)
        sync_folder(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)
        return folder

    def prune(self, keep: int, best: Position | None = None) -> list[Position]:
        removed = [position for position in self.positions()[:-keep] if position != best]
        for position in removed:
            self.remove(position)
        return removed

    def remove(self, position: Position) -> None:
        trash = self.root / f"{REMOVED}{position.name}"
        self.folder(position).rename(trash)  # a folder with a checkpoint's name is never incomplete
        shutil.rmtree(trash)

    def set_aside(self, position: Position) -> None:
        target = self.root / f"damaged-{position.name}"
        if target.exists():
            shutil.rmtree(target)
        self.folder(position).rename(target)
