"""How all ranks write a checkpoint, complete or not at all: they agree after every part.

state.json       counters, controllers, books           models/   weights and optimizers
rollouts.jsonl   every rollout in the buffer            caches/   a file per rank, with `checkpoint.caches`
manifest.json    size and SHA-256 of all other files
"""

from __future__ import annotations

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

Best = tuple[float, Position]


def cache_path(folder: Path, rank: int) -> Path:
    return folder / CACHES / f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    position: Position
    models: ModelShards
    caches: CacheContents | None
    texts: Mapping[str, str]
    best: Best | None


@dataclass(frozen=True)
class CheckpointWriting:
    """One rank's part in writing `snapshot`; `group`: all ranks, reserved for this.

    `warn` shows the user a message; the rank that has it creates and names the folder.
    """

    store: CheckpointStore
    group: dist.ProcessGroup
    snapshot: Snapshot
    keep: int
    keep_best: bool
    warn: Callable[[str], None] | None
    activity: Activity

    def run(self) -> int:
        snapshot = self.snapshot
        folder = self.store.aside(snapshot.position)
        needed = sum(self._together("size", 0, lambda: snapshot.models.num_bytes))
        try:
            self._together("its folder", needed, lambda: self._begin(needed))
            self._together("models", needed, lambda: write_models(folder / MODELS, snapshot.models, self.group))
            self._together("caches and state", needed, self._write_own)
            shares = self._together("checksums", needed, self._seal)
            entries = {name: entry for share in shares for name, entry in share.items()}
            self._together("its name", needed, lambda: self._commit(entries))
        except CheckpointError:
            if self.warn is not None:  # no rank writes any more
                self.store.abandon(snapshot.position)
            raise
        return sum(entry.size_bytes for entry in entries.values())

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
                folder = self.store.aside(self.snapshot.position)
                raise unwritten(folder, f"rank {rank}: {failure}", needed, last)
        return [result for result, _ in answers]

    def _begin(self, needed: int) -> None:
        if self.warn is not None:
            folder = self.store.begin(self.snapshot.position)
            (folder / MODELS).mkdir()
            (folder / CACHES).mkdir()
            if warning := shortage(self.store.root, needed):
                self.warn(warning)

    def _write_own(self) -> None:
        snapshot, folder = self.snapshot, self.store.aside(self.snapshot.position)
        if snapshot.caches is not None:
            write_caches(cache_path(folder, self.group.rank()), snapshot.caches)
        for name, text in snapshot.texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def _seal(self) -> dict[str, Entry]:
        folder = self.store.aside(self.snapshot.position)
        return seal(folder, list_files(folder)[self.group.rank() :: self.group.size()])

    def _commit(self, entries: dict[str, Entry]) -> None:
        if self.warn is None:
            return
        write_manifest(self.store.aside(self.snapshot.position), entries)
        self.store.commit(self.snapshot.position)
        best = self.snapshot.best
        self.store.prune(self.keep, best[1] if self.keep_best and best is not None else None)
