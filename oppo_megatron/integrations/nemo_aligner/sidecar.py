"""Deferred rows beside NeMo-Aligner's checkpoints: `<checkpoints>/oppo/step-<steps done>/`, a pair of files a replica.

NeMo-Aligner resumes from four integers in a checkpoint's file name, which cannot hold rows.

    replica-00000.jsonl          a header, then a line a row: key, lengths, deferrals, versions
    replica-00000.safetensors    the token ids of all rows, prompt and response, one after the other: int64
    manifest.json                size and SHA-256 of each file
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oppo_megatron.errors import CheckpointError
from oppo_megatron.integrations.nemo_aligner.pool import Row
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.manifest import list_files, require_whole, seal, write_manifest

FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """The state from which a replica resumes.  `state`: of the controllers, in plain JSON types."""

    rows: list[Row]
    next_key: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Sidecar:
    """Below `folder`, of replica `replica` of `replicas`.  `writes`: this rank writes for its replica; `leads`: for all.

    `wait` waits for all ranks.
    """

    folder: Path
    replica: int
    replicas: int
    writes: bool
    leads: bool
    wait: Callable[[], None]

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / "oppo")

    def write(self, step: int, kept: Kept) -> None:
        """What has been carried at the end of `step` steps; whole or not there.  A collective call."""
        store, position = self._store, Position(step)
        if self.leads:
            store.begin(position)
        self.wait()
        if self.writes:
            _write_files(store.aside(position) / self._name, kept)
        self.wait()
        if self.leads:
            aside = store.aside(position)
            write_manifest(aside, seal(aside, list_files(aside)))
            store.commit(position)
        self.wait()

    def read(self, step: int) -> Kept | None:
        """What `write` kept; None where the checkpoints are NeMo-Aligner's own, without any sidecar.

        Raises CheckpointError for one that is missing among others, is damaged, or is of another number of replicas.
        """
        there = self._store.positions()
        if not there:
            return None
        if Position(step) not in there:
            steps = ", ".join(str(position.step) for position in there)
            raise CheckpointError(
                f"{self._store.root} has no rows of step {step}, only of {steps}; resume from one of those checkpoints, or move "
                "the folder away to go on without the rows that were deferred, whose prompts are then trained late or not at all"
            )
        folder = self._store.folder(Position(step))
        require_whole(folder)
        _require_replicas(folder, self.replicas)
        return _read_files(folder / self._name)

    @property
    def _name(self) -> str:
        return f"replica-{self.replica:05d}"


def _write_files(stem: Path, kept: Kept) -> None:
    header = {"format": FORMAT, "next_key": kept.next_key, "state": kept.state}
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
            f"{folder} has the rows of {found} data-parallel replicas, there are {replicas} now, whose samplers go through the "
            f"data in another order; resume with {found}"
        )


def _read_files(stem: Path) -> Kept:
    try:
        lines = stem.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        header, *rows = (json.loads(line) for line in lines)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r:.20}, this program reads {FORMAT}")
        tokens: list[int] = load_file(stem.with_suffix(".safetensors"))["tokens"].tolist()
        return Kept(_rebuild(rows, tokens), header["next_key"], header["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
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
