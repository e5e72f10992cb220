"""Work of a step with carried rollouts, from the real scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from oppo_megatron.config.derived import batch_rows
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun

RESPONSES, STEPS, MOST_STEPS = 2048, 4, 48
"""Steady steps observed: enough for these responses, within both limits."""


@dataclass(frozen=True)
class Steady:
    """`reads`: tokens that a role reads, relative to reading each response once."""

    decoding: Decoding
    reads: Mapping[str, float] = field(default_factory=dict)


def steady_work(config: TrainConfig, plain: Decoding, lengths: Callable[[int], int]) -> Steady:
    """Mean work of a step; `plain` is the batch if nothing is carried."""
    if not config.overlap.inter:
        return Steady(plain)
    run = _Observed(config, lengths, plain.prompt_tokens)
    read, sorted_lengths, positions = dict.fromkeys(run.books, 0), list[Any](), 0.0
    count, longest = min(MOST_STEPS, max(STEPS, RESPONSES // batch_rows(config))), max(plain.lengths)
    for step in run.steps(count + longest):
        before, run.before = run.before, {role: book.prefilled_tokens for role, book in run.books.items()}
        if step.clock > longest:  # the responses that began together have ended
            read = {role: read[role] + run.before[role] - before[role] for role in read}
            sorted_lengths.append(np.sort(np.array(list(run.got.values()), dtype=np.int64))[::-1])
            positions += run.positions
        run.got, run.positions = {}, 0.0
        if len(sorted_lengths) == count:
            break
    table = np.zeros((len(sorted_lengths), max(map(len, sorted_lengths))))
    for row, own in enumerate(sorted_lengths):
        table[row, : len(own)] = own
    decoded = tuple(tokens for tokens in np.rint(table.mean(axis=0)).astype(int).tolist() if tokens)
    own_position = sum(tokens * tokens / 2 for tokens in decoded) / sum(decoded)
    carried = max(0, round(positions / table.sum() - own_position))  # tokens before those decoded in the step
    once = {role: batch_rows(config) * (plain.prompt_tokens + fmean(plain.lengths) * (role != "actor")) for role in read}
    reads = {role: tokens / len(table) / once[role] for role, tokens in read.items()}
    return Steady(Decoding(plain.prompt_tokens + carried, decoded, plain.captured), reads)


class _Observed(VirtualRun):
    """`got`: decoded tokens by sequence; `positions`: sum over them; `before`: tokens read so far."""

    def __init__(self, config: TrainConfig, lengths: Callable[[int], int], prompt_tokens: int):
        roomy = config.with_values({"runtime.kv_cache_mb": None})
        if not config.overlap.backfill:  # one round per step, which ends with its batch
            most = config.rollout.max_response_tokens
            roomy = roomy.with_values({"overlap.chunk": most})
        super().__init__(roomy, StepCosts(), lengths, prompt_tokens=prompt_tokens, endless=True)
        self.books = {"actor": self.planner.actor, **self.planner.scorers}
        self.got: dict[int, int] = {}
        self.positions = 0.0
        self.before = dict.fromkeys(self.books, 0)

    def _recorded(self, done: Recorded) -> None:
        super()._recorded(done)
        if done.grown is None or done.chunk is None:
            return
        counts, columns = np.minimum(done.grown.counts, done.chunk.clock - done.begun), done.grown.columns
        self.positions += float((counts * (columns.response_tokens + counts / 2)).sum())
        for seq_id, tokens in zip(columns.seq_ids.tolist(), counts.tolist(), strict=True):
            self.got[seq_id] = self.got.get(seq_id, 0) + tokens
