"""The state of a round on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor

from oppo_megatron.chunks import FREE, Chunk, ChunkRow, ChunkRows, FinishReason, Orders, StopSignal, merge_rows
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.experts import Routing
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.rounds import Batch, Forks


class TakenUp:
    """Begins a round's work in a cache: closes and opens slots, and forks prompts once their source has them cached."""

    def __init__(self, cache: SequenceCache, work: ReplicaWork):
        self._cache, self._forks = cache, Forks(work.fork)
        for seq_id in work.evict:
            cache.close(seq_id)
        for seq_id in work.open:
            cache.open(seq_id)
        for fork in work.fork:  # a plan for another state would fork other tokens
            held = cache.length(fork.source)
            assert held == fork.held, f"sequence {fork.source} has {held} tokens cached, but {fork.held} are planned"
        for source in self._forks.sources:
            self._make(source)

    def check(self, batch: Batch) -> None:
        for growth in batch:
            held = self._cache.length(growth.seq_id)
            assert held == growth.past, f"sequence {growth.seq_id} has {held} tokens cached, but {growth.past} are planned"

    def prefilled(self, batch: Batch) -> None:
        for growth in batch if self._forks.sources else ():
            self._make(growth.seq_id)

    def _make(self, source: int) -> None:
        forks = self._forks.due(source, self._cache.length(source))
        for tokens in sorted({fork.tokens for fork in forks}):
            self._cache.fork(source, [fork.target for fork in forks if fork.tokens == tokens], tokens)


class CacheWorker:
    def __init__(self, model: RoleModel, cache: SequenceCache):
        self.model, self.cache = model, cache
        self._weight = next(model.parameters())

    def restore(self, stored: Mapping[int, Tensor]) -> None:
        for seq_id, cached in stored.items():
            self.cache.restore(seq_id, cached)

    def in_slot_order(self, batch: Batch) -> Batch:
        return tuple(sorted(batch, key=lambda g: self.cache.slot(g.seq_id)))

    def new_hidden(self, num_tokens: int) -> Tensor:
        return self._weight.new_empty(num_tokens, 1, self.model.shape.hidden_size)

    def append(
        self, batch: Batch, sequences: Mapping[int, list[int]], hidden: Tensor | None, taken: TakenUp | None,
        routing: Routing | None = None,
    ) -> Tensor:  # fmt: skip
        """Cache new tokens; return the stage's output, on the last stage only for the last `rows` tokens of each growth."""
        if taken is not None:
            taken.check(batch)
        device, ends = self.cache.device, accumulate(g.new for g in batch)
        rows = [row for g, end in zip(batch, ends, strict=True) for row in range(end - g.rows, end)]
        if self.model.pre_process:
            inputs = on_device([t for g in batch for t in sequences[g.seq_id][g.past : g.past + g.new]], device)
        else:
            assert hidden is not None
            inputs = hidden
        seq_ids, lens = [g.seq_id for g in batch], [g.new for g in batch]
        out = step(self.model, self.cache, seq_ids, lens, inputs, on_device(rows, device), routing)
        if taken is not None:
            taken.prefilled(batch)
        return out


Drawn = npt.NDArray[np.float64]
"""[K steps, 3 + W or 4 + W, R]: tokens, log-probs, sampling log-probs, W words of routes; on ranks that draw also masses (finite:
the logits are valid).
"""


class Growing:
    def __init__(self, rollout: Rollout, limit: int, version: int):
        """A rollout during a round.  `limit`: most response tokens; `row`: tokens of this round; `routes`: by cache position."""
        self.seq_id, self.limit, self.num_prompt_tokens = rollout.seq_id, limit, len(rollout.prompt.tokens)
        self.tokens = [*rollout.prompt.tokens, *rollout.tokens]
        self.routes = [FREE] * (self.num_prompt_tokens - 1) + (rollout.routes or [FREE] * len(rollout.tokens))
        self.row = ChunkRow(rollout.seq_id, len(rollout.tokens), [], [], [], version)

    @property
    def position(self) -> int:
        return self.row.offset + len(self.row.tokens)

    @property
    def room(self) -> int:
        return 0 if self.row.finish_reason is not None else self.limit - self.position

    def append(
        self, tokens: list[int], logprobs: list[float], sampling_logprobs: list[float], routes: list[str],
        reason: FinishReason | None, start: int,
    ) -> None:  # fmt: skip
        """Append in a round from clock `start`; `reason`: why the last token ends the response."""
        self.tokens += tokens
        self.row.tokens += tokens
        self.row.logprobs += logprobs
        self.row.sampling_logprobs += sampling_logprobs
        self.row.routes += routes
        self.row.finish_reason = reason
        if reason is not None:
            self.row.finish_clock = start + len(self.row.tokens)


@dataclass
class DecodeRound:
    """A round from clock `start`.  `local` shows if the batch is complete while decoding (one replica), `stop` in the merge.

    By micro-batch: `lanes` (running sequences), `steps`, `ended` (first void step), last `hidden`, `drawn` and `routes`.
    """

    work: ReplicaWork
    taken: TakenUp
    growing: dict[int, Growing]
    index: int
    start: int
    orders: Orders
    local: StopSignal
    stop: StopSignal
    merged: Chunk | None = None
    ready: tuple[int, int] | None = None  # (step, micro-batch) whose tokens completed the batch
    lanes: list[list[Growing]] = field(init=False)
    steps: list[int] = field(init=False)
    rows: list[ChunkRow] | ChunkRows = field(init=False)
    ended: dict[int, int] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    routes: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lanes = [[self.growing[g.seq_id] for g in batch] for batch in self.work.decode]
        self.steps = [max(g.new for g in batch) for batch in self.work.decode]
        self.rows = [g.row for g in self.growing.values()]

    def live(self, action: Action) -> bool:
        return action.step is None or action.step < self.ended.get(action.micro_batch, action.step + 1)

    def num_tokens(self, action: Action) -> int:
        if action.step is not None:
            return len(self.lanes[action.micro_batch])
        return sum(g.new for g in self.work.prefill[action.micro_batch])

    def merge(self) -> Chunk:
        if self.merged is None:
            self.merged = merge_rows(self.index, self.start, self.rows, self.stop)
            self.merged.orders = self.orders
        return self.merged
