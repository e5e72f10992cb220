"""The cut of a round: decode micro-batches, and tokens of a prefill micro-batch, for the fewest predicted seconds.

With P stages, M micro-batches, w_p the seconds of stage p for one (on the last with its sample), and h the seconds of a message:

    step  L   = max(M max w_p, w_0 + ... + w_(P-1) + P h)   a decode step of all micro-batches
    end   e_p = w_0 + ... + w_p + p h + (M - 1) max(w_0 .. w_p)   when stage p finishes the first step
    gap   g_p = L - M w_p                                   free time of stage p in each step but the last

so stage p decodes until (steps - 1) L + e_p. floor(g_p / t_p) prefill micro-batches of t_p seconds fit into each gap, but no more
than the previous stage's gaps finished; gaps before the first one arrives are missed. The rest follows the decoding, after the
previous stage, and the later stages' time for the last one is added. The slowest stage ends the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints
from oppo_megatron.schedule.weaving.costs import Costs, Linear

Floats = npt.NDArray[np.float64]

MOST_IN_A_GAP = 4
"""Most prefill micro-batches per gap for which sizes are tried."""

ROUNDING = 1e-6
"""A ratio this close to a whole number counts as whole."""


@dataclass(frozen=True)
class Work:
    num_sequences: int  # of the fullest replica
    steps: int
    pp: int
    prefill_tokens: Mapping[str, int]  # by role, of the replica with most


@dataclass(frozen=True, order=True)
class Cut:
    micro_batches: int
    prefill_tokens: int  # most of a micro-batch


def choose_cut(
    work: Work, costs: Costs, budget: int, *, grain: int = 1, micro_batches: int | None = None, prefill_tokens: int | None = None
) -> Cut:
    """Return the fastest cut. `budget`: most tokens of a prefill micro-batch; `grain`: growth of one sequence."""
    most = max(1, min(2 * work.pp, work.num_sequences)) if work.steps else 1
    counts = np.arange(1, most + 1) if micro_batches is None else np.array([micro_batches])
    step = _steps_of(work, counts, costs)
    if prefill_tokens is None:
        tried = _sizes(work, step, costs, budget, grain)
    else:
        tried = [[prefill_tokens]] * len(counts)
    which = np.repeat(np.arange(len(counts)), list(map(len, tried)))
    sizes = np.array(list(chain.from_iterable(tried)), dtype=np.int64)
    seconds = _predicted(work, sizes, costs, step.at(which))
    best = np.lexsort((-sizes, counts[which], seconds))[0]
    return Cut(int(counts[which[best]]), int(sizes[best]))


def predict_s(work: Work, cut: Cut, costs: Costs) -> float:
    step = _steps_of(work, np.array([cut.micro_batches]), costs)
    return float(_predicted(work, np.array([cut.prefill_tokens]), costs, step)[0])


def even_ends(count: int, portions: int) -> list[int]:
    """Ends of at most `portions` runs of `count` items, from 0; longer runs first."""
    assert portions >= 1, f"items are cut into at least 1 portion, not {portions}"
    short, longer = divmod(count, min(portions, count or 1))
    return [short * i + min(i, longer) for i in range(min(portions, count) + 1)]


class _Steps(NamedTuple):
    """Seconds of a decode step, [cuts]; gap per step and end of the first, [stages, cuts]."""

    seconds: Floats
    gap_s: Floats
    end_s: Floats

    def at(self, which: Ints) -> _Steps:
        return _Steps(self.seconds[which], self.gap_s[:, which], self.end_s[:, which])


def _steps_of(work: Work, micro_batches: Ints, costs: Costs) -> _Steps:
    if not work.num_sequences or not work.steps:
        none = np.zeros((work.pp, len(micro_batches)))
        return _Steps(none[0], none, none)
    sequences, message_s = -(-work.num_sequences // micro_batches), _message_s(work, costs)
    busy = _seconds([costs.decode_at(stage) for stage in range(work.pp)], sequences)
    busy[-1] += _seconds([costs.sample], sequences)[0]
    step_s = np.maximum(micro_batches * busy.max(axis=0), sum(busy) + work.pp * message_s)
    ends = np.cumsum(busy, axis=0) + (micro_batches - 1) * np.maximum.accumulate(busy)
    return _Steps(step_s, step_s - micro_batches * busy, ends + np.arange(work.pp)[:, None] * message_s)


def _predicted(work: Work, sizes: Ints, costs: Costs, step: _Steps) -> Floats:
    message_s, steps = _message_s(work, costs), max(0, work.steps - 1)
    gaps = np.full(step.end_s.shape, float(steps))  # that each stage has left
    ends = steps * step.seconds + step.end_s
    drain = np.zeros_like(ends)
    tokens = {role: number for role, number in work.prefill_tokens.items() if number}
    counts = [-(-number // sizes) for number in tokens.values()]
    seconds = [
        _prefill_s(work, role, np.concatenate([number / count, np.minimum(number, sizes)]), costs)
        for (role, number), count in zip(tokens.items(), counts, strict=True)
    ]
    longest = [both[:, len(sizes) :] for both in seconds]
    missed: Iterable[Floats] = _missed(step, np.stack(longest, axis=1), message_s) if longest else ()
    for each, own, count, gone_by in zip(seconds, longest, counts, missed, strict=True):
        own_s = each[:, : len(sizes)]
        none = own <= 0
        in_a_gap = np.where(none, count, np.trunc(step.gap_s / np.where(none, 1.0, own) + ROUNDING))
        gaps = np.maximum(0.0, np.minimum(gaps, gaps[0] - gone_by))
        woven = np.minimum.accumulate(np.minimum(count, np.trunc(gaps * in_a_gap + ROUNDING)))
        gaps -= woven / np.where(woven > 0, in_a_gap, 1.0)
        rest = woven < count
        _append(ends, own_s, woven, count, message_s)
        later = np.zeros_like(own_s)
        later[:-1] = np.cumsum((own_s[1:] + message_s)[::-1], axis=0)[::-1]
        np.maximum(drain, later, out=drain, where=rest)
    found: Floats = (ends + drain).max(axis=0)
    return found


def _append(ends: Floats, seconds: Floats, woven: Floats, count: Ints, message_s: float) -> None:
    follows = np.zeros_like(ends)  # 1 if it waits for the previous stage
    np.multiply(woven[1:] < count, woven[1:] == woven[:-1], out=follows[1:])
    left, through, ready = (count - woven) * seconds, seconds + message_s, np.zeros_like(ends[0])
    for end, more, one, waits in zip(ends, left, through, follows, strict=True):
        start = np.maximum(end, ready * waits)
        np.add(start, more, out=end)
        np.add(start, one, out=ready)


def _missed(step: _Steps, seconds: Floats, message_s: float) -> Floats:
    """Gaps before a role's first micro-batch arrives, [roles, stages, cuts]."""
    decodes, found = step.seconds > 0, np.zeros_like(seconds)
    step_s, ready = np.where(decodes, step.seconds, 1.0), step.end_s[0]
    for stage, (end, gap, own) in enumerate(zip(step.end_s, step.gap_s, seconds, strict=True)):
        late = (ready + own - end - gap) / step_s
        missed = np.where(decodes, np.maximum(0.0, np.ceil(late - ROUNDING)), 0.0)
        found[stage] = missed
        ready = np.maximum(ready, end + missed * step.seconds) + own + message_s
    by_role: Floats = found.swapaxes(0, 1)
    return by_role


def _message_s(work: Work, costs: Costs) -> float:
    return costs.message_s if work.pp > 1 else 0.0


def _prefill_lines(work: Work, role: str, costs: Costs) -> list[Linear]:
    lines = costs.prefill_of(role)
    if isinstance(lines, Linear):
        return [lines] * work.pp
    return [lines[round(stage * (len(lines) - 1) / max(1, work.pp - 1))] for stage in range(work.pp)]


def _prefill_s(work: Work, role: str, tokens: Ints | Floats, costs: Costs) -> Floats:
    seconds = _seconds(_prefill_lines(work, role, costs), np.rint(tokens))
    seconds[-1] += _seconds([costs.score], np.rint(tokens))[0]
    return seconds


def _seconds(lines: Sequence[Linear], numbers: Ints | Floats) -> Floats:
    fixed, each = np.array([(line.fixed_s, line.per_token_s) for line in lines]).T[:, :, None]
    found: Floats = fixed + numbers * each
    return found


def _sizes(work: Work, step: _Steps, costs: Costs, budget: int, grain: int) -> list[list[int]]:
    halves = [budget]
    while halves[-1] // 2 >= grain:
        halves.append(halves[-1] // 2)
    lines = [_prefill_lines(work, role, costs) for role in work.prefill_tokens]
    if not lines:
        return [halves] * len(step.seconds)
    fixed_s, per_token_s = np.array([[(line.fixed_s, line.per_token_s) for line in own] for own in lines]).T
    fixed_s[-1] += costs.score.fixed_s
    per_token_s[-1] += costs.score.per_token_s
    parts = step.gap_s[:, None] / np.arange(1, MOST_IN_A_GAP + 1)[:, None]  # [stages, parts, cuts]
    bounded = per_token_s > 0  # [stages, roles]
    fits = np.full(parts.shape, np.inf)
    for role, own in enumerate(bounded.T):
        fit = (parts[own] - fixed_s[own, role, None, None]) / per_token_s[own, role, None, None]
        fits[own] = np.minimum(fits[own], fit)
    fits = fits[bounded.any(axis=1)].reshape(-1, parts.shape[2])
    found = (fits + ROUNDING).astype(np.int64) // grain * grain
    return [[*halves, *sorted(size for size in set(own) if 0 < size < budget)] for own in found.T.tolist()]
