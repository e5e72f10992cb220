"""The actor on one rank, decoding.

Legend: R rows (running sequences of a micro-batch), V vocabulary, T packed tokens.

Every rank of a replica keeps the same books: the last pipeline stage draws the tokens, identically on its tensor ranks, and the
other stages receive them.  A decode micro-step is exactly one token of each running sequence of a micro-batch.

Where one rank holds all layers (or tensor ranks of one stage), micro-steps may run on the device for a while before their
tokens are read (`device_decode.py`); the round's result is the same.

A micro-step is *void*, and skipped by every rank of the replica alike, once its micro-batch has no running sequence or the
batch was complete by the micro-batch's own step before (in the order of steps, then micro-batches: a rank must not use
news of later micro-steps, which other ranks may not have).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from oppo_megatron.chunks import GOES_ON, Chunk, ChunkRows
from oppo_megatron.engine.decode_round import DecodeRound
from oppo_megatron.engine.device_decode import DeviceLane, Row
from oppo_megatron.engine.growing import Drawn, Growing, beside, joined
from oppo_megatron.engine.row_exchange import gather_rows
from oppo_megatron.engine.row_words import DRAWN
from oppo_megatron.engine.sampler import Sampling, draw, no_distribution
from oppo_megatron.engine.splits import by_rows, obstacle, prefill
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import ChunkOutlet
from oppo_megatron.engine.taking_up import TakenUp
from oppo_megatron.mcore.cuda_graphs import CapturedSteps, run_eagerly
from oppo_megatron.mcore.host_copies import on_device
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.out_of_memory import Done, MemoryLimits, attempt
from oppo_megatron.mcore.stage import step
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.planning.merge import StopSignal
from oppo_megatron.schedule.rounds import Batch

ResultT = TypeVar("ResultT")


class DecodeWorker:
    """The actor's worker: prefills prompts, decodes micro-steps, and says what a round has produced."""

    def __init__(
        self,
        model: RoleModel,
        cache: SequenceCache,
        *,
        sampling: Sampling,
        stopping: Stopping,
        outlet: ChunkOutlet | None = None,
        sync_steps: int = 1,
        memory_limits: MemoryLimits | None = None,
    ):
        """`outlet` makes the messages for ranks without the actor, on the rank that sends them.

        Drawn tokens are read once in `sync_steps` micro-steps, where the model has a single pipeline stage; else in each.
        `memory_limits` bound the work that this rank prefills and decodes at once, if memory does not suffice for the plan.
        """
        self.model, self.cache, self.outlet = model, cache, outlet
        self.sampling, self.stopping = sampling, stopping
        self.memory_limits = memory_limits or MemoryLimits()
        self._weight = next(model.parameters())
        self._sync_steps = sync_steps if model.groups.pp == 1 else 1
        self._resident: dict[int, DeviceLane] = {}  # by micro-batch
        self._begun: DecodeRound | None = None
        captures = self._sync_steps > 1 and cache.device.type == "cuda"
        self.captured = CapturedSteps(cache.device, model.parameters) if captures else None

    def order(self, seq_ids: Sequence[int]) -> list[int]:
        """The open sequences among `seq_ids` in the order of their slots; the others as they come."""
        return sorted(seq_ids, key=lambda i: self.cache.slot(i) if i in self.cache else self.cache.num_slots)

    def invalidate(self) -> None:
        """The weights changed: caches must be computed again."""
        for seq_id in self.cache.seq_ids:
            self.cache.truncate(seq_id, 0)

    def stop(self, seq_ids: Sequence[int]) -> None:
        """These leave the cache between two rounds; others may be another replica's."""
        held = [seq_id for seq_id in seq_ids if seq_id in self.cache]
        for seq_id in sorted(held, key=self.cache.slot, reverse=True):
            self.cache.close(seq_id)

    def resume(self, stored: Mapping[int, Tensor]) -> None:
        """Open sequences with what was cached of them, in the order of their slots."""
        for seq_id, cached in stored.items():
            self.cache.restore(seq_id, cached)

    def begin(
        self,
        work: ReplicaWork,
        rollouts: Sequence[Rollout],
        readiness: Callable[[], StopSignal],
        *,
        index: int,
        clock: int,
        version: int,
        halt: bool = False,
        outlived: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """A round of this replica's `work` begins.  `readiness()` is a fresh signal of what the batch still waits for.

        `halt` is passed on with the chunk.  `version` is the policy's; what is drawn over a cache that has outlived
        updates is of the oldest weights in it.
        """
        taken = TakenUp(self.cache, work)
        running = {g.seq_id for batch in work.decode for g in batch}
        held = {r.seq_id: r for r in rollouts if r.seq_id in running}
        growing = {i: Growing(r, self.stopping.limit(i), version - outlived.get(i, 0)) for i, r in held.items()}
        self._begun = DecodeRound(work, taken, growing, index, clock, halt, local=readiness(), stop=readiness())
        if self.captured is not None:
            self.captured.renew()

    @property
    def _round(self) -> DecodeRound:
        """The round under way."""
        assert self._begun is not None, "no round has begun"
        return self._begun

    def live(self, action: Action) -> bool:
        return self._round.live(action)

    def compute(self, action: Action) -> int:
        if action.op is Op.GATHER:
            self._gather()
            return 0
        if action.op is Op.PREFILL:
            return self._prefill_step(action.micro_batch)
        if action.op is Op.DECODE:
            return self._decode_step(action) if self._sync_steps == 1 else self._device_step(action)
        return self._sample(action) if self._sync_steps == 1 else self._read(action)

    def outbox(self, action: Action) -> Sequence[Tensor]:
        if action.payload is Payload.CHUNK:
            assert self.outlet is not None
            return self.outlet.message(self._round.merge())
        if action.payload is Payload.TOKENS:
            return [on_device(self._round.drawn[action.micro_batch], self.cache.device, torch.float64)]
        return [self._round.hidden[action.micro_batch].contiguous()]

    def inbox(self, action: Action) -> Iterator[Tensor]:
        if action.payload is Payload.TOKENS:
            shape = DRAWN, len(self._round.lanes[action.micro_batch])
            table_3R = torch.empty(shape, dtype=torch.float64, device=self.cache.device)
            yield table_3R
            self._absorb(action, [table_3R.tolist()])
        else:
            hidden = self._weight.new_empty(self._round.num_tokens(action), 1, self.model.shape.hidden_size)
            yield hidden
            self._round.hidden[action.micro_batch] = hidden

    def end(self) -> Chunk:
        """The round's chunk, of all replicas; what has finished, or was decoded beyond it, leaves this one's cache."""
        chunk = self._round.merge()
        rows, finished = chunk.rows, []
        lengths, ended = (rows.offsets + rows.counts).tolist(), (rows.finish_clocks != GOES_ON).tolist()
        for seq_id, length, end in zip(rows.seq_ids.tolist(), lengths, ended, strict=True):
            growing = self._round.growing.get(seq_id)
            if growing is None:
                continue
            if end:
                finished.append(seq_id)
            else:
                cached = growing.num_prompt_tokens + length - 1
                self.cache.truncate(seq_id, min(cached, self.cache.length(seq_id)))
        for seq_id in sorted(finished, key=self.cache.slot, reverse=True):
            self.cache.close(seq_id)
        return chunk

    def _prefill_step(self, micro_batch: int) -> int:
        batch = tuple(sorted(self._round.prefill[micro_batch], key=lambda g: self.cache.slot(g.seq_id)))
        hidden_T = None if self.model.pre_process else self._round.hidden[micro_batch]
        splits = prefill(self.cache, batch, hidden_T, self._advance, self.memory_limits.score, obstacle(self.model))
        self._round.hidden[micro_batch] = joined([out for _, out in splits])
        self._round.taken.prefilled(batch)
        return sum(growth.new for growth in batch)

    def _advance(self, batch: Batch, hidden_T: Tensor | None, whole: bool) -> Tensor:
        """Prefill prompts, or stale sequences, without output."""
        tokens = [t for g in batch for t in self._round.growing[g.seq_id].tokens[g.past : g.past + g.new]]
        no_rows = torch.empty(0, dtype=torch.int64, device=self.cache.device)
        return self._stage([g.seq_id for g in batch], [g.new for g in batch], tokens, hidden_T, no_rows)

    def _decode_step(self, action: Action) -> int:
        micro_batch, lane = action.micro_batch, self._round.lanes[action.micro_batch]
        hidden_R = None if self.model.pre_process else self._round.hidden[micro_batch]
        splits = self._in_splits(lane, hidden_R, self._decode_rows, self._uncache)
        tensors = [split for split in splits if isinstance(split, Tensor)]
        if tensors:
            self._round.hidden[micro_batch] = joined(tensors)
        else:
            self._round.tables[micro_batch] = beside([split for split in splits if not isinstance(split, Tensor)])
        return len(lane)

    def _in_splits(
        self,
        lane: list[Growing],
        inputs_R: Tensor | None,
        work: Callable[[list[Growing], Tensor | None, bool], ResultT],
        undo: Callable[[list[Growing]], None],
    ) -> list[ResultT]:
        return by_rows(lane, inputs_R, work, undo, self.memory_limits.decode, obstacle(self.model), Growing.describe)

    def _uncache(self, lane: list[Growing]) -> None:
        """The last tokens are cached no longer: those that a decode step begins with."""
        for growing in lane:
            self.cache.truncate(growing.seq_id, len(growing.tokens) - 1)

    def _decode_rows(self, lane: list[Growing], hidden_R: Tensor | None, whole: bool) -> Tensor | Drawn:
        """This stage's output for one more token.  On the last one, of a split: what it draws."""
        tokens = [g.tokens[-1] for g in lane]
        out = self._stage([g.seq_id for g in lane], [1] * len(lane), tokens, hidden_R, None)
        return out if whole or not self.model.groups.is_last_stage else self._draw(lane, out, whole)

    def _stage(
        self, seq_ids: list[int], lens: list[int], tokens: list[int], hidden_T: Tensor | None, rows_R: Tensor | None
    ) -> Tensor:
        inputs = hidden_T
        if inputs is None:
            inputs = on_device(tokens, self.cache.device)
        return step(self.model, self.cache, seq_ids, lens, inputs, rows_R)

    def _draw(self, lane: list[Growing], logits_RV: Tensor | None, whole: bool) -> Drawn:
        assert logits_RV is not None
        seq_ids, positions = [g.seq_id for g in lane], [g.position for g in lane]
        drawn = draw(logits_RV, self.sampling, seq_ids, positions, self.model.vocab)
        return drawn.read(self.sampling, seq_ids, positions)

    def _sample(self, action: Action) -> int:
        micro_batch = action.micro_batch
        drawn = self._round.tables.pop(micro_batch, None)
        if drawn is None:
            lane, logits_RV = self._round.lanes[micro_batch], self._round.hidden[micro_batch]
            drawn = beside(self._in_splits(lane, logits_RV, self._draw, lambda _: None))
        self._round.drawn[micro_batch] = drawn
        return self._absorb(action, [drawn])

    def _device_step(self, action: Action) -> int:
        """Decode and draw without looking at what was drawn; where memory runs out, the host takes over for this round."""
        micro_batch, lane = action.micro_batch, self._round.lanes[action.micro_batch]
        if micro_batch not in self._round.by_step:
            outcome = attempt(lambda: self._start_step(action))
            if isinstance(outcome, Done):
                return len(lane)
            self._take_over(action, outcome.told)
        return self._decode_step(action) if self.live(action) else 0

    def _start_step(self, action: Action) -> None:
        assert action.step is not None
        lane, resident = self._round.lanes[action.micro_batch], self._resident_lane(action.micro_batch)
        if not resident.loaded:
            rows = [Row(g.seq_id, g.tokens[-1], g.position, g.limit) for g in lane]
            resident.load(rows, self._round.steps[action.micro_batch] - action.step)
        resident.step()

    def _take_over(self, action: Action, told: str) -> None:
        """Take up what the steps before `action` have drawn on the device."""
        assert action.step is not None
        lane = self._round.lanes[action.micro_batch]
        name = lane[0].describe() if len(lane) == 1 else None
        self.memory_limits.decode.lower(len(lane), told, last=name, obstacle=obstacle(self.model))
        self._round.by_step.add(action.micro_batch)
        resident = self._resident.get(action.micro_batch)
        drawn = [] if resident is None else resident.give_up()
        if drawn:
            self._absorb(replace(action, step=action.step - 1), drawn, resident=True)

    def _read(self, action: Action) -> int:
        """Look at what was drawn, where it is time to."""
        if action.micro_batch in self._round.by_step:
            return self._sample(action)
        lane, resident = self._round.lanes[action.micro_batch], self._resident[action.micro_batch]
        return len(lane) if resident.loaded else self._absorb(action, resident.read(), resident=True)

    def _resident_lane(self, micro_batch: int) -> DeviceLane:
        if micro_batch not in self._resident:
            self._resident[micro_batch] = DeviceLane(
                self.model,
                self.cache,
                self.captured or run_eagerly,
                sampling=self.sampling,
                eos_ids=self.stopping.eos_ids,
                sync_steps=self._sync_steps,
                name=micro_batch,
            )
        return self._resident[micro_batch]

    def _absorb(self, action: Action, drawn: Sequence[Drawn], resident: bool = False) -> int:
        """What the last micro-steps drew joins the sequences; those that end leave the micro-batch.

        They keep their slots to the end of the round: their end may lie beyond the chunk's, and then they go on.
        `resident`: the cache has not been told yet.
        """
        assert action.step is not None
        lane, first = self._round.lanes[action.micro_batch], action.step + 1 - len(drawn)
        rows, ends = list(lane), dict[int, int]()
        for step_, table in enumerate(drawn, start=first):
            for growing, token, logprob, sampling_logprob, *mass in zip(rows, *table, strict=True):
                if growing.seq_id in ends:
                    continue
                if not all(map(math.isfinite, mass)):
                    raise no_distribution(self.sampling, growing.seq_id, growing.position)
                if growing.append(int(token), logprob, sampling_logprob, self.stopping, self._round.start):
                    ends[growing.seq_id] = step_
        if resident:
            for growing in rows:
                self.cache.advance(growing.seq_id, ends.get(growing.seq_id, action.step) + 1 - first)
        self._leave(action.micro_batch, ends)
        here = (action.step, action.micro_batch)
        if not lane or (self._round.ready is not None and self._round.ready <= here):
            self._round.ended[action.micro_batch] = action.step + 1
        return len(rows)

    def _leave(self, micro_batch: int, ends: Mapping[int, int]) -> None:
        """Take ended sequences, by id the micro-step of their end, out of the micro-batch, in the order of their ends.

        What was decoded after the batch was complete counts for nothing: no one leaves any more.
        """
        lane = self._round.lanes[micro_batch]
        for step_ in sorted(set(ends.values())):
            if self._round.ready is not None and self._round.ready <= (step_ - 1, micro_batch):
                return
            for growing in [g for g in lane if ends.get(g.seq_id) == step_]:
                last = lane[-1]
                lane[lane.index(growing)] = last
                lane.pop()
                self.cache.exchange(growing.seq_id, last.seq_id)  # so that the micro-batch keeps neighbouring slots
                if self.model.groups.dp == 1:  # else other replicas have a say in when the batch is complete
                    self._round.hear(growing.seq_id, (step_, micro_batch))

    def _gather(self) -> None:
        self._round.rows = gather_rows(ChunkRows.of(self._round.rows), self.model.groups.collection.dp)
