"""What a step has to do where rollouts are carried over: a matter of lengths, delta and admission, of no layout.

The product's own scheduler plays it on one rank, without seconds.  Carried rollouts fill up the decode batch, which then has
fewer steps, and their caches are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.config.derived import batch_rows
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun

RESPONSES, STEPS, MOST_STEPS = 2048, 4, 48
"""Steps that are looked at once rollouts are carried steadily: as many as have so many responses, within both."""


@dataclass(frozen=True)
class Steady:
    """A step's work: what is decoded in it, and by what factor each role reads more than every response once."""

    decoding: Decoding
    reads: Mapping[str, float] = field(default_factory=dict)


def steady_work(config: TrainConfig, plain: Decoding, lengths: Callable[[int], int]) -> Steady:
    """`plain`: the batch as if nothing was carried, which it is without inter-step overlap."""
    if not config.overlap.inter:
        return Steady(plain)
    count = min(MOST_STEPS, max(STEPS, RESPONSES // batch_rows(config)))
    run = _Watched(config, lengths, plain.prompt_tokens)
    seen = run.watched(count, max(plain.lengths))
    rows = max(len(each.decoded) for each in seen)
    table = np.zeros((len(seen), rows))
    for row, each in enumerate(seen):
        table[row, : len(each.decoded)] = np.sort(each.decoded)[::-1]
    decoded = tuple(tokens for tokens in np.rint(table.mean(axis=0)).astype(int).tolist() if tokens)
    own = sum(tokens * tokens / 2 for tokens in decoded) / sum(decoded)
    position = sum(each.positions for each in seen) / sum(int(each.decoded.sum()) for each in seen)
    once = {
        role: batch_rows(config) * (plain.prompt_tokens + fmean(plain.lengths) * (role != "actor"))
        for role in run.books
    }
    reads = {role: fmean(each.read[role] for each in seen) / tokens for role, tokens in once.items()}
    carried = max(0, round(position - own))  # tokens in front of what is decoded
    return Steady(Decoding(plain.prompt_tokens + carried, decoded, plain.captured), reads)


@dataclass(frozen=True)
class _Seen:
    """A step: tokens that each running sequence gets, the sum of their places in the responses, and tokens read by role."""

    decoded: Ints
    positions: float
    read: Mapping[str, int]


class _Watched(VirtualRun):
    """A run whose caches hold all sequences."""

    def __init__(self, config: TrainConfig, lengths: Callable[[int], int], prompt_tokens: int):
        super().__init__(_in_few_rounds(config), StepCosts(), lengths, prompt_tokens=prompt_tokens, endless=True)
        self.books = {"actor": self.planner.actor, **self.planner.scorers}
        self.got: dict[int, int] = {}
        self.positions = 0.0

    def watched(self, count: int, longest: int) -> list[_Seen]:
        """So many steps, from when responses that were there at the beginning have ended."""
        found, before = list[_Seen](), self._read()
        for step in self.steps(count + longest):
            read = self._read()
            if step.clock > longest:
                tokens = np.array(list(self.got.values()), dtype=np.int64)
                found.append(_Seen(tokens, self.positions, {role: read[role] - before[role] for role in read}))
            before, self.got, self.positions = read, {}, 0.0
            if len(found) == count:
                break
        return found

    def _read(self) -> dict[str, int]:
        return {role: book.prefilled_tokens for role, book in self.books.items()}

    def _recorded(self, done: Recorded[Any]) -> None:
        super()._recorded(done)
        if done.grown is None or done.chunk is None:
            return
        counts = np.minimum(done.grown.counts, done.chunk.clock - done.begun)
        columns = done.grown.columns
        self.positions += float((counts * (columns.response_tokens + counts / 2)).sum())
        for seq_id, tokens in zip(columns.seq_ids.tolist(), counts.tolist(), strict=True):
            self.got[seq_id] = self.got.get(seq_id, 0) + tokens


def _in_few_rounds(config: TrainConfig) -> TrainConfig:
    """With room for all sequences.  A step is one round, which ends with its batch, unless prompts come in between rounds."""
    runtime, overlap = config.runtime.model_copy(update={"kv_cache_mb": None}), config.overlap
    if not overlap.backfill:
        most = config.rollout.max_response_tokens
        chunk = overlap.chunk.model_copy(update={"tokens": most, "adaptive": False})
        overlap = overlap.model_copy(update={"chunk": chunk})
    return config.model_copy(update={"runtime": runtime, "overlap": overlap})
