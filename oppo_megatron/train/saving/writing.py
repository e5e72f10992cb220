"""How all ranks write a checkpoint, complete or not at all: they agree after every part.

state.json       counters, controllers, books           models/   weights and optimizers
rollouts.jsonl   every rollout in the buffer            caches/   a file per rank
manifest.json    size and SHA-256 of all other files
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.checkpoint import ModelShards, write_models
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.disk import shortage, unwritten
from oppo_megatron.rundir.manifest import Entry, list_files, seal, write_manifest
from oppo_megatron.train.saving.caches import CacheContents, write_caches

STATE, ROLLOUTS, MODELS, CACHES = "state.json", "rollouts.jsonl", "models", "caches"
ResultT = TypeVar("ResultT")


def cache_path(folder: Path, rank: int) -> Path:
    return folder / CACHES / f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """A rank's contents of a checkpoint; `texts`: files by name; `best`: the position that is kept as the best."""

    position: Position
    models: ModelShards
    caches: CacheContents | None
    texts: Mapping[str, str]
    best: Position | None


@dataclass(frozen=True)
class CheckpointWriting:
    """One rank's part in writing `snapshot`; `group`: all ranks, reserved for this.

    `warn` shows the user a message; the rank that has it creates and names the folder.
    """

    store: CheckpointStore
    group: dist.ProcessGroup
    snapshot: Snapshot
    keep: int
    warn: Callable[[str], None] | None
    activity: Activity

    def run(self) -> tuple[int, float]:
        """Return the bytes written and the seconds."""
        started, snapshot, folder = time.monotonic(), self.snapshot, self._folder
        needed = sum(self._together("size", 0, lambda: snapshot.models.num_bytes))
        try:
            self._together("its folder", needed, lambda: self._begin(needed))
            self._together("models", needed, lambda: write_models(folder / MODELS, snapshot.models, self.group))
            self._together("caches and state", needed, self._write_own)
            part = slice(self.group.rank(), None, self.group.size())
            shares = self._together("checksums", needed, lambda: seal(folder, list_files(folder)[part]))
            entries = {name: entry for share in shares for name, entry in share.items()}
            self._together("its name", needed, lambda: self._commit(entries))
        except CheckpointError:
            if self.warn is not None:  # no rank writes any more
                self.store.abandon(snapshot.position)
            raise
        return sum(entry.size_bytes for entry in entries.values()), time.monotonic() - started

    @property
    def _folder(self) -> Path:
        return self.store.aside(self.snapshot.position)

    def _together(self, part: str, needed: int, work: Callable[[], ResultT]) -> list[ResultT]:
        """Do `work` on every rank; return the results by rank.  Raises CheckpointError on all ranks if one fails."""
        mine: tuple[ResultT | None, str | None]
        try:
            with self.activity.doing(part):
                mine = work(), None
        except (OSError, SafetensorError, CheckpointError) as error:
            mine = None, getattr(error, "strerror", None) or str(error)
        answers: list[Any] = [None] * self.group.size()
        with self.activity.doing(f"{part} of all ranks", waits=True):
            dist.all_gather_object(answers, mine, group=self.group)
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                last = next((whole.name for whole in reversed(self.store.positions())), None)
                raise unwritten(self._folder, f"rank {rank}: {failure}", needed, last)
        return [result for result, _ in answers]

    def _begin(self, needed: int) -> None:
        if self.warn is not None:
            folder = self.store.begin(self.snapshot.position)
            (folder / MODELS).mkdir()
            (folder / CACHES).mkdir()
            if warning := shortage(self.store.root, needed):
                self.warn(warning)

    def _write_own(self) -> None:
        if self.snapshot.caches is not None:
            write_caches(cache_path(self._folder, self.group.rank()), self.snapshot.caches)
        for name, text in self.snapshot.texts.items():
            (self._folder / name).write_text(text, encoding="utf-8")

    def _commit(self, entries: dict[str, Entry]) -> None:
        if self.warn is not None:
            write_manifest(self._folder, entries)
            self.store.commit(self.snapshot.position)
            self.store.prune(self.keep, self.snapshot.best)
