"""How a round's work is cut: into how many decode micro-batches, and into prefill micro-batches of how many tokens.

Few, large micro-batches pay fixed costs seldom; small ones leave or fill the gaps of the decode pipeline better.  The
choice is the cut of fewest predicted seconds.  With P stages, n sequences in M micro-batches, d and s the seconds of a
stage's decode and sample of ceil(n / M) sequences, and h those of a message:

    lap   L = max(M (d + s), P d + s + P h)           a step of all micro-batches, once the pipeline is full
    decode  = (steps - 1) L + P d + s + (P - 1) h + (M - 1) (d + s)
    gap   g = L - M (d + s)                           what a lap leaves free of a stage, in one piece

A role with t seconds for a micro-batch puts floor(g / t) of them into each gap.  The last stage misses the gaps that go
by until the first micro-batch reaches it: each stage has its gap d + h later than the one before, and a micro-batch that
comes too late for a gap waits for the next.  What the gaps do not hold comes after decoding.  If that is so on the first
stage already, (P - 1) t pass until the last one has it all.  One stage (P = 1, h = 0) has no gaps: decoding and prefill
follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple, TypeVar

from oppo_megatron.schedule.costs import Costs

T = TypeVar("T")

MOST_IN_A_GAP = 4
"""Prefill micro-batches that a gap is cut for."""

ROUNDING = 1e-6
"""What is this close to a whole number of micro-batches is one."""


@dataclass(frozen=True)
class Work:
    """What one actor replica and the scorers on its ranks have to do in a round.

    `num_sequences` are decoded for `steps`; `prefill_tokens` are, by role, the new tokens that one replica of it takes.
    """

    num_sequences: int
    steps: int
    pp: int
    prefill_tokens: Mapping[str, int]


@dataclass(frozen=True, order=True)
class Cut:
    """Decode micro-batches of a replica, and the most tokens of a prefill micro-batch."""

    micro_batches: int
    prefill_tokens: int


def choose_cut(
    work: Work,
    costs: Costs,
    budget: int,
    *,
    grain: int = 1,
    micro_batches: int | None = None,
    prefill_tokens: int | None = None,
) -> Cut:
    """The cut with the fewest predicted seconds; among equals fewer decode micro-batches, then larger prefill ones.

    `budget` is the most tokens of a prefill micro-batch, `grain` how many one sequence grows by, which is not divided.
    `micro_batches` and `prefill_tokens` are settled where given.
    """
    most = max(1, min(2 * work.pp, work.num_sequences)) if work.steps else 1
    return min(
        (
            Cut(count, size)
            for count in (range(1, most + 1) if micro_batches is None else [micro_batches])
            for size in (_sizes(work, count, costs, budget, grain) if prefill_tokens is None else [prefill_tokens])
        ),
        key=lambda cut: (predict_s(work, cut, costs), cut.micro_batches, -cut.prefill_tokens),
    )


def predict_s(work: Work, cut: Cut, costs: Costs) -> float:
    """Seconds of the woven round by the formula above."""
    lap = _lap(work, cut.micro_batches, costs)
    early = late = float(work.steps if work.num_sequences else 0)
    rest_first = rest_last = drain = 0.0
    for role, tokens in work.prefill_tokens.items():
        if not tokens:
            continue
        count = ceil(tokens / cut.prefill_tokens)
        seconds, longest = (_prefill_s(role, n, costs) for n in (tokens / count, min(tokens, cut.prefill_tokens)))
        in_a_gap = int(lap.gap_s / longest + ROUNDING) if longest > 0 else count
        late = min(late, early - _ramp(work.pp, lap, longest))

        first, last = min(count, int(early * in_a_gap)), min(count, max(0, int(late * in_a_gap)))
        early -= first / in_a_gap if first else 0.0
        late -= last / in_a_gap if last else 0.0
        rest_first += (count - first) * seconds
        rest_last += (count - last) * seconds
        drain = max(drain, (work.pp - 1) * seconds) if first < count else drain
    return lap.decoding_s + max(rest_first + drain, rest_last)


def even_portions(items: Sequence[T], portions: int) -> list[list[T]]:
    """`items` in order, in at most `portions` runs whose lengths differ by at most one; longer ones first, none empty."""
    assert portions >= 1, f"items are cut into at least 1 portion, not {portions}"
    short, longer = divmod(len(items), min(portions, len(items) or 1))
    ends = [short * i + min(i, longer) for i in range(min(portions, len(items)) + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


class _Lap(NamedTuple):
    """One decode step of all micro-batches: the gap it leaves of a stage, how much later the next stage has it; all steps."""

    gap_s: float
    shift_s: float
    decoding_s: float


def _lap(work: Work, micro_batches: int, costs: Costs) -> _Lap:
    if not work.num_sequences or not work.steps:
        return _Lap(0.0, 0.0, 0.0)
    sequences = ceil(work.num_sequences / micro_batches)
    decode, sample = costs.decode(sequences), costs.sample(sequences)
    shift = decode + (costs.message_s if work.pp > 1 else 0.0)
    busy = micro_batches * (decode + sample)
    lap = max(busy, work.pp * shift + sample)
    return _Lap(lap - busy if work.pp > 1 else 0.0, shift, (work.steps - 1) * lap + (work.pp - 1) * shift + busy)


def _ramp(pp: int, lap: _Lap, seconds: float) -> int:
    """Gaps of the last stage that go by before it has its first micro-batch of `seconds`."""
    missed, offset = 0, 0.0
    for _ in range(pp - 1):
        offset = max(0.0, offset + seconds - lap.shift_s)
        if offset + seconds > lap.gap_s * (1 + ROUNDING):
            missed, offset = missed + 1, 0.0
    return missed


def _prefill_s(role: str, tokens: float, costs: Costs) -> float:
    """Seconds of a micro-batch on the last stage, each new token with its output row."""
    return costs.prefill_of(role)(round(tokens)) + costs.score(round(tokens))


def _sizes(work: Work, micro_batches: int, costs: Costs, budget: int, grain: int) -> Iterator[int]:
    """Sizes of prefill micro-batches worth trying: the budget, its half and so on, and those that just fill a gap."""
    size = budget
    yield size
    while size // 2 >= grain:
        size //= 2
        yield size
    gap_s = _lap(work, micro_batches, costs).gap_s
    slopes = [costs.prefill_of(role).per_token_s + costs.score.per_token_s for role in work.prefill_tokens]
    fixed = [costs.prefill_of(role).fixed_s + costs.score.fixed_s for role in work.prefill_tokens]
    for parts in range(1, MOST_IN_A_GAP + 1):
        fits = [(gap_s / parts - at_least) / slope for at_least, slope in zip(fixed, slopes, strict=True) if slope > 0]
        size = int(min(fits, default=0) + ROUNDING) // grain * grain
        if 0 < size < budget:
            yield size
