"""The actor's decode engine.

Legend: R rows (running sequences), V vocabulary.

Every rank of the actor keeps the same books: the last pipeline stage draws the tokens, identically on its tensor ranks, and
the other stages receive them.  A sequence whose cache lacks some of its tokens (a new prompt, or a rollout carried over an
update) is simply given all of them at its next decode step: prefill and decode are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.records import Chunk, ChunkRow, Rollout
from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.vocab_parallel import gather_logits
from oppo_megatron.runtime.pipeline import StageCall, StageRunner
from oppo_megatron.runtime.sampler import Draw, Sampling, draw
from oppo_megatron.runtime.stopping import Stopping
from oppo_megatron.schedule.packing import pack_by_tokens


class StopSignal(Protocol):
    """What ends a round early: told of every finished sequence, `ready` once the batch is complete."""

    @property
    def ready(self) -> bool: ...

    def finish(self, seq_id: int) -> None: ...


class _Growing:
    """A running sequence within a round."""

    def __init__(self, rollout: Rollout, limit: int, version: int):
        self.seq_id, self.limit = rollout.seq_id, limit
        self.tokens = [*rollout.prompt.tokens, *rollout.tokens]
        self.row = ChunkRow(rollout.seq_id, len(rollout.tokens), [], [], [], version)

    @property
    def position(self) -> int:
        """Response position of the next token."""
        return self.row.offset + len(self.row.tokens)

    def append(self, token: int, logprob: float, sampling_logprob: float) -> None:
        self.tokens.append(token)
        self.row.tokens.append(token)
        self.row.logprobs.append(logprob)
        self.row.sampling_logprobs.append(sampling_logprob)


class Generator:
    """Decodes rollouts in rounds.

    Consumes rollouts (prompt + tokens so far); produces a `Chunk` a round.  Waits for nothing but its own pipeline.
    With fewer cache slots than rollouts, those admitted first run and the others join as slots become free.
    """

    def __init__(
        self,
        model: RoleModel,
        cache: KVCache,
        *,
        sampling: Sampling,
        stopping: Stopping,
        prefill_tokens: int,
    ):
        self.model, self.cache = model, cache
        self.sampling, self.stopping, self.prefill_tokens = sampling, stopping, prefill_tokens
        self.runner = StageRunner(model, cache)

    def invalidate(self, seq_ids: Sequence[int]) -> None:
        """The weights changed: what is cached of these sequences is to be computed again."""
        for seq_id in seq_ids:
            if seq_id in self.cache:
                self.cache.truncate(seq_id, 0)

    def decode_round(
        self, rollouts: Sequence[Rollout], stop: StopSignal, *, index: int, max_steps: int, clock: int, version: int
    ) -> Chunk:
        """Up to `max_steps` decode steps over the unfinished `rollouts`, ending at the step at which `stop` is ready."""
        waiting = [_Growing(r, self.stopping.limit(r.seq_id), version) for r in rollouts]
        running = [g for g in waiting if g.seq_id in self.cache]
        waiting = [g for g in waiting if g.seq_id not in self.cache]
        rows = []
        for _ in range(max_steps):
            while waiting and self.cache.num_free:
                self.cache.open(waiting[0].seq_id)
                running.append(waiting.pop(0))
            if not running:
                break
            clock += 1
            running, ended = self._step(running, clock, stop)
            rows += [g.row for g in ended]
            if stop.ready:
                break
        return Chunk(index, clock, rows + [g.row for g in running if g.row.tokens])

    def _step(self, running: list[_Growing], clock: int, stop: StopSignal) -> tuple[list[_Growing], list[_Growing]]:
        """One token for every running sequence -> (those that go on, those that ended)."""
        order, calls = self._calls(running)
        drawn = self._draw(self.runner.run(calls), order)
        ended = []
        for growing, token, logprob, sampling_logprob in zip(order, *drawn, strict=True):
            growing.append(int(token), logprob, sampling_logprob)
            if token == self.stopping.eos_id:
                growing.row.finish_reason = "eos"
            elif growing.position == growing.limit:
                growing.row.finish_reason = "length"
            if growing.row.finish_reason:
                growing.row.finish_clock = clock
                ended.append(growing)
        for growing in ended:
            self.cache.close(growing.seq_id)
            stop.finish(growing.seq_id)
        return [g for g in running if g.row.finish_reason is None], ended

    def _calls(self, running: list[_Growing]) -> tuple[list[_Growing], list[StageCall]]:
        """The unit steps that bring every cache up to its sequence's last token, and the sequences in their order."""
        running = sorted(running, key=lambda g: self.cache.slot(g.seq_id))  # closing a sequence moves another one
        missing = [len(g.tokens) - self.cache.length(g.seq_id) for g in running]
        decode = max(missing) == 1
        bins = [list(range(len(running)))] if decode else pack_by_tokens(missing, self.prefill_tokens)
        calls = []
        for members in map(sorted, bins):
            lens = [missing[i] for i in members]
            tokens = [t for i in members for t in running[i].tokens[-missing[i] :]]
            ends = [sum(lens[: k + 1]) - 1 for k in range(len(lens))]
            calls.append(StageCall([running[i].seq_id for i in members], lens, tokens, None if decode else ends))
        return [running[i] for members in bins for i in sorted(members)], calls

    def _draw(self, outputs: list[Tensor], order: list[_Growing]) -> list[list[float]]:
        """Tokens, log-probs and sampling log-probs of the rows, on every rank of the actor."""
        groups = self.model.groups
        table_3R = torch.empty(3, len(order), dtype=torch.float64, device=self.cache.device)
        if groups.is_last_stage:
            logits_RV = gather_logits(torch.cat(outputs), groups.collection.tp)
            result: Draw = draw(logits_RV, self.sampling, [g.seq_id for g in order], [g.position for g in order])
            table_3R = torch.stack([x.double() for x in (result.tokens, result.logprobs, result.sampling_logprobs)])
        if groups.pp > 1:
            dist.broadcast(table_3R, groups.output_rank, group=groups.all)
        return table_3R.tolist()
