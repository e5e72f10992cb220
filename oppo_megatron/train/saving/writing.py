"""How all ranks write a checkpoint, complete or not at all: they agree after every part.

state.json       counters, controllers, books           models/   weights and optimizers
rollouts.jsonl   every rollout in the buffer            caches/   a file per rank
manifest.json    size and SHA-256 of all other files
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import CapacityError, CheckpointError
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.weights.checkpoint import ModelShards, write_models
from oppo_megatron.nesting import read_json
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.disk import shortage, unwritten
from oppo_megatron.rundir.manifest import Entry, list_files, seal, write_manifest

CACHED, OUTPUT = "kv", "out"


@dataclass(frozen=True)
class CacheContents:
    """A rank's file: tensors `<role>.kv.<sequence>` and `<role>.out.<sequence>`, and each role's sequences by slot."""

    tensors: dict[str, Tensor]
    slots: dict[str, list[int]]


def gather_caches(rounds: RoundRunner, *, copied: bool) -> CacheContents:
    contents = CacheContents({}, {})

    def hold(name: str, values: Tensor) -> None:
        contents.tensors[name] = values.to("cpu", copy=copied).contiguous()

    for role, cache in _caches(rounds).items():
        contents.slots[role] = cache.seq_ids
        for seq_id in cache.seq_ids:
            hold(f"{role}.{CACHED}.{seq_id}", cache.stored(seq_id))
    for role, worker in rounds.scoring.items():
        for seq_id, values in worker.outputs().items():
            hold(f"{role}.{OUTPUT}.{seq_id}", values)
    return contents


def write_caches(path: Path, contents: CacheContents) -> None:
    save_file(contents.tensors, path, {"slots": json.dumps(contents.slots)})


def load_caches(path: Path, rounds: RoundRunner) -> None:
    """Load a file into empty caches of the same layout, each sequence into its slot, after the books.

    Raises CheckpointError if the file does not match the books.
    """
    try:
        with safe_open(path, framework="pt") as file:
            order = read_json(file.metadata()["slots"])
            for role, cache in _caches(rounds).items():
                cached = {seq_id: file.get_tensor(f"{role}.{CACHED}.{seq_id}") for seq_id in order[role]}
                if role == "actor":
                    assert rounds.decode is not None
                    rounds.decode.restore(cached)
                else:
                    rounds.scoring[role].resume(cached, _outputs(file, role))
                _require_booked(role, cache, rounds)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, CapacityError) as error:
        raise CheckpointError(
            f"{path}: not what the books of the checkpoint say of this rank's caches ({type(error).__name__}: "
            f"{str(error):.200}); resume in another layout, or from another checkpoint"
        ) from error


def require_sound_books(state: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
    """Raise CheckpointError if the books in `state.json` do not match its layout and rollouts."""
    tokens = {rollout.seq_id: rollout.num_tokens for rollout in rollouts}
    for role, book in state["books"].items():
        replica_of, replicas = dict(book["replicas"]), state["layout"][role]["dp"]
        cached = [(seq_id, replica, count) for replica, part in enumerate(book["cached"]) for seq_id, count in part]
        sound = (
            len(book["cached"]) == replicas
            and len(replica_of) == len(book["replicas"])
            and replica_of.keys() <= tokens.keys()
            and all(replica < replicas for replica in replica_of.values())
            and len({seq_id for seq_id, _, _ in cached}) == len(cached)
            and all(replica_of.get(seq_id) == replica and count <= tokens[seq_id] for seq_id, replica, count in cached)
            and ("outputs" in book) == (role != "actor")
            and all(seq_id in replica_of and count <= tokens[seq_id] for seq_id, count in book.get("outputs", []))
            and all(len(dict(pairs)) == len(pairs) for pairs in (book.get("outputs", []), book.get("outlived") or []))
            and {seq_id for seq_id, _ in book.get("outlived") or []} <= {seq_id for seq_id, _, _ in cached}
            and max((count for _, count in book.get("outlived") or []), default=0) <= state["actor"]["version"]
        )
        if not sound:
            raise CheckpointError(
                f"state.json: the book of {role} does not fit its {replicas} replicas and the {len(tokens)} rollouts; resume "
                "in another layout, or from another checkpoint"
            )


def _outputs(file: Any, role: str) -> dict[int, Tensor]:
    prefix = f"{role}.{OUTPUT}."
    found = {int(name.removeprefix(prefix)): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
    for seq_id, values in found.items():
        if values.dim() != 1 or not values.is_floating_point():
            raise ValueError(f"outputs of sequence {seq_id} are {values.dtype} {list(values.shape)}")
    return found


def _require_booked(role: str, cache: SequenceCache, rounds: RoundRunner) -> None:
    planner, coords = rounds.planner, rounds.replicas[role]
    book = planner.actor if role == "actor" else planner.scorers[role]
    held = {seq_id: cache.length(seq_id) for seq_id in cache.seq_ids}
    if held != book.cached(coords):
        raise ValueError(f"{role}: cached tokens by sequence are {held}, not {dict(book.cached(coords))}")
    if role != "actor" and rounds.scoring[role].model.post_process:
        given = {seq_id: len(values) for seq_id, values in rounds.scoring[role].outputs().items() if len(values)}
        due = planner.scorers[role].outputs(coords)
        if given != due:
            raise ValueError(f"{role}: outputs by sequence are {given}, not {dict(due)}")


def _caches(rounds: RoundRunner) -> dict[str, SequenceCache]:
    caches = {role: worker.cache for role, worker in rounds.scoring.items()}
    return caches if rounds.decode is None else caches | {"actor": rounds.decode.cache}


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
