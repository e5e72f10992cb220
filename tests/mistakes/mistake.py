"""A mistake: how the project is spoilt, what is typed, what the answer must say, and what it advises."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Edit = Callable[[Path], None]
"""Of the project's folder."""

VALIDATE = ("validate", "train.yaml")


@dataclass(frozen=True)
class Mistake:
    """`says`: words with the wrong value and the remedy; after `mends` (edits of the project), typing `then` succeeds."""

    name: str
    typed: Sequence[str]
    says: Sequence[str]
    then: Sequence[str] = VALIDATE
    spoils: Sequence[Edit] = ()
    mends: Sequence[Edit] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def write(name: str, text: str | bytes) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return edit


def replace(name: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text, f"{name} has no {old!r}: the case is out of date"
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


def remove(name: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def cut(name: str, num_bytes: int) -> Edit:
    """Leave the first bytes of a file, as an interrupted copy does."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])

    return edit


def copy(name: str, to: str) -> Edit:
    def edit(folder: Path) -> None:
        source = folder / name
        shutil.copytree(source, folder / to) if source.is_dir() else shutil.copyfile(source, folder / to)

    return edit


def setting(name: str, wrong: str, right: str, *says: str, command: str = "train") -> Mistake:
    return Mistake(name, (command, f"{command}.yaml", wrong), says, ("validate", f"{command}.yaml", right))
