"""Deferred rows next to NeMo-Aligner's checkpoints: `<checkpoints>-oppo/step-<steps done>/`, two files per replica.

NeMo takes every folder among its checkpoints for one of them, so rows have a folder of their own, next to theirs.

    replica-00000.jsonl          a header, which names the checkpoints of the same step that were there before, then one line
                                 per row: key, lengths, deferrals, versions
    replica-00000.safetensors    the token ids of all rows, prompt and response, one after the other: int64
    manifest.json                size and SHA-256 of each file
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
"""The step in the name of a NeMo-Aligner checkpoint; NeMo-Aligner reads the step from it, too."""

Agree = Callable[[Exception | None, type[OppoError]], None]
"""Collective on all ranks: raises on each of them if any has an error."""


@dataclass(frozen=True)
class Kept:
    """The state from which a replica resumes."""

    rows: list[Row]
    next_key: int
    state: dict[str, Any]  # of the controllers, in JSON types
    not_of: frozenset[str] = frozenset()  # names of checkpoints of the same step that an earlier run left in the folder


def folder_beside(checkpoints: Path) -> Path:
    """Return the folder of the rows whose checkpoints are in `checkpoints`."""
    whole = checkpoints.resolve()
    return whole.with_name(f"{whole.name}-oppo")


def steps_of(checkpoints: Path) -> set[int]:
    """Return the steps of the checkpoints, also unfinished ones, in a folder of NeMo's: files, folders, or files per rank."""
    return {step for step, _ in _steps_and_paths(checkpoints)}


def stamps_of(checkpoints: Path, step: int) -> dict[str, int]:
    """Return when each checkpoint of a step was changed last, in nanoseconds, by its name."""
    stamps: dict[str, int] = {}
    for found, path in _steps_and_paths(checkpoints):
        if found == step:
            stamps[name_of(path)] = max(stamps.get(name_of(path), 0), _changed(path))
    return stamps


def _changed(path: Path) -> int:
    try:
        return max(part.stat().st_mtime_ns for part in (path, *(path.iterdir() if path.is_dir() else ())))
    except FileNotFoundError:  # on its way out
        return 0


def name_of(checkpoint: Path) -> str:
    return checkpoint.name.removesuffix(".ckpt")


def _steps_and_paths(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    for path in (path for pattern in ("*", "*_rank_*/*") for path in checkpoints.glob(pattern)):
        if (found := STEP.search(path.name)) is not None:
            yield int(found[1]), path


@dataclass(frozen=True)
class Sidecar:
    """The rows in `root`.  `writes`: this rank writes for its replica; `leads`: for all; `agree` shares a rank's error."""

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
        """Write the rows carried at the end of `step` steps, atomically.  A collective call.  Raises CheckpointError."""
        store, position = self._store, Position(step)
        self._together(self.leads, lambda: store.begin(position))
        self._together(self.writes, lambda: _write_files(store.aside(position) / self._name, kept))
        self._together(self.leads, lambda: self._commit(position))

    def prune(self, checkpoints: Path, step: int) -> None:
        """Remove what belongs to checkpoints that are no longer in their folder.  A collective call.  Raises CheckpointError.

        Keeps `step`, whose checkpoint may still be being written; keeps all if no checkpoint's name has a step.
        """
        self._together(self.leads, lambda: self._prune(steps_of(checkpoints), step))

    def read(self, step: int, name: str | None = None) -> Kept | None:
        """Read what `write` kept for the checkpoint `name`; None if there is nothing for any step.  A collective call.

        Raises CheckpointError for rows that are missing among others, are damaged, or belong to another number of replicas or
        another checkpoint of the same step.
        """
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

    def _prune(self, steps: Set[int], step: int) -> None:
        for position in self._store.positions():
            if steps and position.step not in steps | {step}:
                self._store.remove(position)

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
        _require_replicas(folder, self.replicas)
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
    lines = [header, *(_describe(row) for row in kept.rows)]
    stem.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokens = [token for row in kept.rows for token in row.context]
    save_file({"tokens": torch.tensor(tokens, dtype=torch.int64)}, stem.with_suffix(".safetensors"))


def _describe(row: Row) -> Mapping[str, Any]:
    return {
        "key": row.key, "prompt": len(row.prompt), "response": len(row.tokens), "deferrals": row.deferrals,
        "versions": row.versions, "finished": row.finished,
    }  # fmt: skip


def _require_replicas(folder: Path, replicas: int) -> None:
    found = len(list(folder.glob("replica-*.jsonl")))
    if found != replicas:
        raise CheckpointError(
            f"{folder} has the rows of {found} data-parallel replicas, but there are {replicas} now; resume with {found}"
        )


def _read_files(stem: Path) -> Kept:
    try:
        lines = stem.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        header, *rows = (read_json(line) for line in lines)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r:.20}, this program reads {FORMAT}")
        tokens: list[int] = load_file(stem.with_suffix(".safetensors"))["tokens"].tolist()
        not_of = frozenset[str](header.get("not_of", ()))
        return Kept(_rebuild(rows, tokens), header["next_key"], header["state"], not_of)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{stem}: not what was written ({error}); resume from another checkpoint, with as many replicas"
        ) from error


def _rebuild(lines: Sequence[Mapping[str, Any]], tokens: list[int]) -> list[Row]:
    rows, at = [], 0
    for line in lines:
        middle, end = at + line["prompt"], at + line["prompt"] + line["response"]
        versions = [(int(policy), int(count)) for policy, count in line["versions"]]
        rows.append(
            Row(line["key"], tokens[at:middle], tokens[middle:end], versions, line["deferrals"], line["finished"])
        )
        at = end
    if at != len(tokens):
        raise ValueError(f"{len(tokens)} token ids for rows of {at}")
    return rows
