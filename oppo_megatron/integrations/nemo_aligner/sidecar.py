"""Deferred rows in `<checkpoints>-oppo/step-<steps done>/`, because NeMo takes any folder among its checkpoints for one.

replica-00000.jsonl         header (names the step's earlier checkpoints), then a row per line
replica-00000.safetensors   token ids of all rows, prompt and response, int64
manifest.json               size and SHA-256 of each file
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oppo_megatron.errors import CheckpointError, OppoError
from oppo_megatron.integrations.nemo_aligner.pool import Row
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.manifest import list_files, require_whole, seal, write_manifest

FORMAT = 1
STEP = re.compile(r"(?<![A-Za-z_])step=(\d+)")
"""Step in the name of a NeMo-Aligner checkpoint, from which NeMo-Aligner reads it, too."""

Agree = Callable[[Exception | None, type[OppoError]], None]
"""Collective: raises on all ranks if any has an error."""


@dataclass(frozen=True)
class Kept:
    rows: list[Row]
    next_key: int
    state: dict[str, Any]  # of the controllers, in JSON types
    not_of: frozenset[str] = frozenset()  # names of checkpoints of the same step that an earlier run left in the folder


def folder_next_to(checkpoints: Path) -> Path:
    whole = checkpoints.resolve()
    return whole.with_name(f"{whole.name}-oppo")


def stamps_of(checkpoints: Path, step: int) -> dict[str, int]:
    """Time of last change in ns, by name."""
    stamps: dict[str, int] = {}
    for found, path in _steps_and_paths(checkpoints):
        if found == step:
            stamp = stamps.setdefault(name_of(path), 0)
            with suppress(FileNotFoundError):  # it is being removed
                changed = max(part.stat().st_mtime_ns for part in (path, *(path.iterdir() if path.is_dir() else ())))
                stamps[name_of(path)] = max(stamp, changed)
    return stamps


def name_of(checkpoint: Path) -> str:
    return checkpoint.name.removesuffix(".ckpt")


def _steps_and_paths(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    for path in (path for pattern in ("*", "*_rank_*/*") for path in checkpoints.glob(pattern)):
        if (found := STEP.search(path.name)) is not None:
            yield int(found[1]), path


@dataclass(frozen=True)
class Sidecar:
    """This rank `writes` for its replica, `leads` for all."""

    root: Path
    replica: int
    replicas: int
    writes: bool
    leads: bool
    agree: Agree

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.root)

    def write(self, step: int, kept: Kept) -> None:
        """Collective.  Raises CheckpointError."""
        store, position = self._store, Position(step)
        self._together(self.leads, lambda: store.begin(position))
        self._together(self.writes, lambda: _write_files(store.aside(position) / self._name, kept))
        self._together(self.leads, lambda: self._commit(position))

    def prune(self, checkpoints: Path, step: int) -> None:
        """Remove rows of removed checkpoints, except `step`'s.  Collective."""

        def remove() -> None:
            steps = {found for found, _ in _steps_and_paths(checkpoints)}
            for position in self._store.positions():
                if steps and position.step not in steps | {step}:
                    self._store.remove(position)

        self._together(self.leads, remove)

    def read(self, step: int, name: str | None = None) -> Kept | None:
        """Read checkpoint `name`'s rows, None if no step has any.  Collective.  Raises CheckpointError."""
        found: list[Kept | None] = []
        self._together(True, lambda: found.append(self._read(step, name)))
        return found[0]

    def _together(self, mine: bool, work: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            if mine:
                work()
        except CheckpointError as wrong:
            error = wrong
        except (OSError, SafetensorError) as failed:
            error = CheckpointError(f"{self.root}: {failed}; see to the disk, or resume from another checkpoint")
        self.agree(error, CheckpointError)

    def _commit(self, position: Position) -> None:
        aside = self._store.aside(position)
        write_manifest(aside, seal(aside, list_files(aside)))
        self._store.commit(position)

    def _read(self, step: int, name: str | None) -> Kept | None:
        there = self._store.positions()
        if not there:
            return None
        if Position(step) not in there:
            steps = ", ".join(str(position.step) for position in there)
            raise CheckpointError(
                f"{self.root} has no rows of step {step}, only of {steps}; resume from one of those checkpoints, or move "
                "the folder away to continue without the deferred rows, whose prompts are then trained late or not at all"
            )
        folder = self._store.folder(Position(step))
        require_whole(folder)
        found = len(list(folder.glob("replica-*.jsonl")))
        if found != self.replicas:
            raise CheckpointError(
                f"{folder} has the rows of {found} data-parallel replicas, but there are {self.replicas} now; resume with {found}"
            )
        kept = _read_files(folder / self._name)
        if name in kept.not_of:
            raise CheckpointError(
                f"{folder} has the rows of another checkpoint of step {step}, saved later than {name}; resume from that or from "
                f"another step, or move {self.root} away to continue without the deferred rows"
            )
        return kept

    @property
    def _name(self) -> str:
        return f"replica-{self.replica:05d}"


def _write_files(stem: Path, kept: Kept) -> None:
    header = {"format": FORMAT, "next_key": kept.next_key, "state": kept.state, "not_of": sorted(kept.not_of)}
    lines: list[Mapping[str, Any]] = [header]
    for row in kept.rows:
        sizes = {"prompt": len(row.prompt), "response": len(row.tokens)}
        state = {"deferrals": row.deferrals, "versions": row.versions, "finished": row.finished}
        lines.append({"key": row.key, **sizes, **state})
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokens = [token for row in kept.rows for token in row.context]
    save_file({"tokens": torch.tensor(tokens, dtype=torch.int64)}, stem.with_suffix(".safetensors"))


def _read_files(stem: Path) -> Kept:
    try:
        lines = stem.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        header, *states = (read_json(line) for line in lines)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r:.20}, this program reads {FORMAT}")
        tokens: list[int] = load_file(stem.with_suffix(".safetensors"))["tokens"].tolist()
        rows, at = [], 0
        for row in states:
            middle, end = at + row["prompt"], at + row["prompt"] + row["response"]
            versions = [(int(policy), int(count)) for policy, count in row["versions"]]
            rows.append(Row(row["key"], tokens[at:middle], tokens[middle:end], versions, row["deferrals"], row["finished"]))
            at = end
        if at != len(tokens):
            raise ValueError(f"{len(tokens)} token ids for rows of {at}")
        return Kept(rows, header["next_key"], header["state"], frozenset(header.get("not_of", ())))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{stem}: not what was written ({error}); resume from another checkpoint, with as many replicas"
        ) from error
