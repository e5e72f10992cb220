"""The cut of a round: the number of decode micro-batches, and the tokens of a prefill micro-batch.

Few, large micro-batches pay fixed costs seldom; small ones leave or fill the gaps of the decode pipeline better.  The
choice is the cut of fewest predicted seconds.  With P stages, n sequences in M micro-batches, w_p the seconds of stage p
with ceil(n / M) sequences (its decode, on the last stage its sample too), and h those of a message:

    lap   L   = max(M max w_p, w_0 + ... + w_(P-1) + P h)   a step of all micro-batches, once the pipeline is full
    end   e_p = w_0 + ... + w_p + p h + (M - 1) max(w_0 .. w_p)   when stage p is done with the first step
    gap   g_p = L - M w_p                                   what each lap but the last one leaves free of a stage

so stage p decodes until (steps - 1) L + e_p.  A role with t_p seconds for a micro-batch puts floor(g_p / t_p) of them
into each gap, but no more than came out of the gaps of the stage before.  Stage p misses the gaps that go by until the
first micro-batch reaches it, and one that comes too late for a gap waits for the next.  What the gaps of a stage do not
hold comes after its decoding, and no sooner than it comes from the stage before; the later stages' time for the last of
it comes on top.  The stage that ends last ends the round.  One stage (P = 1, h = 0) has no gaps: decoding and prefill
follow each other.

A scorer of another layout is taken to have the actor's stages, each at the cost of its own stage of the same depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple, TypeVar

from oppo_megatron.schedule.weaving.costs import Costs, Linear

T = TypeVar("T")

MOST_IN_A_GAP = 4
"""Prefill micro-batches that a gap is cut for."""

ROUNDING = 1e-6
"""A ratio this close to a whole number of micro-batches counts as whole."""


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
    best: tuple[float, int, int] | None = None
    for count in range(1, most + 1) if micro_batches is None else [micro_batches]:
        lap = _lap(work, count, costs)
        if best is not None and max(_ends(work, lap)) > best[0]:  # decoding alone takes longer
            continue
        for size in _sizes(work, lap, costs, budget, grain) if prefill_tokens is None else [prefill_tokens]:
            found = (_predicted(work, Cut(count, size), costs, lap), count, -size)
            best = found if best is None else min(best, found)
    assert best is not None, "there is at least one number of micro-batches, and at least the budget"
    return Cut(best[1], -best[2])


def predict_s(work: Work, cut: Cut, costs: Costs) -> float:
    """Seconds of the woven round by the formula above."""
    return _predicted(work, cut, costs, _lap(work, cut.micro_batches, costs))


def even_portions(items: Sequence[T], portions: int) -> list[list[T]]:
    """`items` in order, in at most `portions` runs whose lengths differ by at most one; longer ones first, none empty."""
    assert portions >= 1, f"items are cut into at least 1 portion, not {portions}"
    short, longer = divmod(len(items), min(portions, len(items) or 1))
    ends = [short * i + min(i, longer) for i in range(min(portions, len(items)) + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


class _Lap(NamedTuple):
    """One decode step of all micro-batches; by stage, the gap that it leaves, and when the stage is done with the first."""

    seconds: float
    gap_s: Sequence[float]
    end_s: Sequence[float]


def _lap(work: Work, micro_batches: int, costs: Costs) -> _Lap:
    if not work.num_sequences or not work.steps:
        return _Lap(0.0, [0.0] * work.pp, [0.0] * work.pp)
    sequences, message_s = ceil(work.num_sequences / micro_batches), _message_s(work, costs)
    busy = [costs.decode_at(stage)(sequences) for stage in range(work.pp)]
    busy[-1] += costs.sample(sequences)
    lap = max(micro_batches * max(busy), sum(busy) + work.pp * message_s)
    reached, slowest = accumulate(busy), accumulate(busy, max)
    ends = [a + p * message_s + (micro_batches - 1) * b for p, (a, b) in enumerate(zip(reached, slowest, strict=True))]
    return _Lap(lap, [lap - micro_batches * seconds for seconds in busy], ends)


def _ends(work: Work, lap: _Lap) -> list[float]:
    """When each stage has decoded."""
    decoded = max(0, work.steps - 1) * lap.seconds
    return [decoded + end for end in lap.end_s]


def _predicted(work: Work, cut: Cut, costs: Costs, lap: _Lap) -> float:
    message_s = _message_s(work, costs)
    gaps = [float(max(0, work.steps - 1))] * work.pp  # left of each stage
    ends = _ends(work, lap)
    drain = [0.0] * work.pp
    for role, tokens in work.prefill_tokens.items():
        if not tokens:
            continue
        count = ceil(tokens / cut.prefill_tokens)
        seconds = _prefill_s(work, role, tokens / count, costs)
        longest = _prefill_s(work, role, min(tokens, cut.prefill_tokens), costs)
        begun, before, ready = gaps[0], count, 0.0
        for stage, missed in enumerate(_missed(lap, longest, message_s)):
            in_a_gap = int(lap.gap_s[stage] / longest[stage] + ROUNDING) if longest[stage] > 0 else count
            gaps[stage] = max(0.0, min(gaps[stage], begun - missed))
            woven = min(before, int(gaps[stage] * in_a_gap + ROUNDING))
            gaps[stage] -= woven / in_a_gap if woven else 0.0
            if woven < count:
                start = max(ends[stage], ready if woven == before else 0.0)
                ready = start + seconds[stage] + message_s
                ends[stage] = start + (count - woven) * seconds[stage]
                later = sum(seconds[stage + 1 :]) + (work.pp - 1 - stage) * message_s
                drain[stage] = max(drain[stage], later)
            before = woven
    return max(map(sum, zip(ends, drain, strict=True)))


def _missed(lap: _Lap, seconds: Sequence[float], message_s: float) -> list[int]:
    """By stage, its gaps that go by before it has a role's first micro-batch, which takes it `seconds`."""
    missed, ready = [], lap.end_s[0]
    for end, gap, own in zip(lap.end_s, lap.gap_s, seconds, strict=True):
        late = ready + own - end - gap
        missed.append(max(0, ceil(late / lap.seconds - ROUNDING)) if lap.seconds > 0 else 0)
        ready = max(ready, end + missed[-1] * lap.seconds) + own + message_s
    return missed


def _message_s(work: Work, costs: Costs) -> float:
    return costs.message_s if work.pp > 1 else 0.0


def _prefill_lines(work: Work, role: str, costs: Costs) -> list[Linear]:
    """The role's lines by stage of the actor, each of the role's own stage that is as deep."""
    lines = costs.prefill_of(role)
    if isinstance(lines, Linear):
        return [lines] * work.pp
    return [lines[round(stage * (len(lines) - 1) / max(1, work.pp - 1))] for stage in range(work.pp)]


def _prefill_s(work: Work, role: str, tokens: float, costs: Costs) -> list[float]:
    """Seconds of a micro-batch by stage; on the last, each new token with its output row."""
    seconds = [line(round(tokens)) for line in _prefill_lines(work, role, costs)]
    seconds[-1] += costs.score(round(tokens))
    return seconds


def _sizes(work: Work, lap: _Lap, costs: Costs, budget: int, grain: int) -> Iterator[int]:
    """Sizes of prefill micro-batches worth trying: the budget, its half and so on, and those that just fill a gap."""
    size = budget
    yield size
    while size // 2 >= grain:
        size //= 2
        yield size
    roles = [_prefill_lines(work, role, costs) for role in work.prefill_tokens]
    found = set[int]()
    for stage, gap in enumerate(lap.gap_s):
        score = costs.score if stage == work.pp - 1 else Linear(0.0, 0.0)
        own = [Linear(a.fixed_s + score.fixed_s, a.per_token_s + score.per_token_s) for a in (r[stage] for r in roles)]
        for parts in range(1, MOST_IN_A_GAP + 1):
            fits = [(gap / parts - line.fixed_s) / line.per_token_s for line in own if line.per_token_s > 0]
            found.add(int(min(fits, default=0) + ROUNDING) // grain * grain)
    yield from sorted(size for size in found if 0 < size < budget)
