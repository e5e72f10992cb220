"""What is planned in arrays is what plain loops find, one unit, cut or sequence after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.overcommit.readiness import Readiness
from oppo_megatron.schedule.rounds import Growth, Round, Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.cut import ROUNDING, Cut, Work, predict_s
from oppo_megatron.schedule.weaving.gaps import Gaps
from oppo_megatron.schedule.weaving.generators import GENERATORS, Line, Placer, by_turns
from oppo_megatron.schedule.weaving.timetable import Timetable

RANKS = (0, 1)

LINES = st.builds(Linear, st.sampled_from((0.0, 1e-3, 3.7e-3)), st.sampled_from((0.0, 1e-5, 7e-5)))


@st.composite
def fillings(draw: st.DrawFn) -> tuple[int, int, list[int], list[tuple[int, int, int]]]:
    """Tensor ranks, the shortest gap that counts, the edges of busy times, and units (ready, duration, line) to be placed."""
    edges = sorted(draw(st.sets(st.integers(1, 60), max_size=8)))
    units = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9), st.integers(0, 2)), max_size=25))
    if draw(st.booleans()):
        units.sort()
    return draw(st.sampled_from((1, 2))), draw(st.integers(1, 4)), edges[len(edges) % 2 :], units


@settings(deadline=None, max_examples=300)
@given(case=fillings())
def test_filling_is_placing_one_after_the_other(case: tuple[int, int, list[int], list[tuple[int, int, int]]]) -> None:
    num_ranks, shortest, edges, units = case
    ranks = RANKS[:num_ranks]
    together, apart = (Gaps(ranks, shortest) for _ in range(2))
    for gaps in (together, apart) if edges else ():
        busy = np.array(edges, dtype=np.int64)
        gaps.append(ranks, busy[::2], busy[1::2])
    table = np.array(units, dtype=np.int64).reshape(-1, 3)
    ends, expected = [0, 0, 0], []
    for ready, duration, line in units:
        expected.append(apart.place(ranks, max(ready, ends[line]), duration))
        ends[line] = expected[-1] + duration
    assert together.fill(ranks, table[:, 0], table[:, 1], table[:, 2].tolist()).tolist() == expected
    for probe in (1, 2, 5, 9):  # the same gaps are left
        assert together.place(ranks, 0, probe) == apart.place(ranks, 0, probe)


class _OneByOne(Placer):
    """Goes through all stages with one micro-batch before it looks at the next."""

    def _place_by_stage(self, lines: Sequence[Line]) -> None:
        by_turns(lines, lambda n, j, _: self._place_prefill(lines[n], lines[n].times[j].tolist()))


@st.composite
def shared(draw: st.DrawFn) -> tuple[Round, Site, Costs]:
    """A round of an actor and scorers on the same stages."""
    pp = draw(st.integers(2, 4))
    roles = draw(st.lists(st.sampled_from(("reference", "critic", "reward")), min_size=1, unique=True))
    site = Site({role: RolePlacement(tuple(range(pp)), 1, pp, 1) for role in ("actor", *roles)})
    ids, steps = iter(range(10_000)), draw(st.integers(0, 12))
    decode = tuple((Growth(next(ids), 5, steps),) for _ in range(draw(st.integers(1, 4)) if steps else 0))

    def batches() -> tuple[tuple[Growth, ...], ...]:
        return tuple((Growth(next(ids), 3, new, 1),) for new in draw(st.lists(st.integers(1, 300), max_size=12)))

    prefill = {role: (batches(),) for role in roles}
    own = {role: tuple(draw(LINES) for _ in range(pp)) for role in ("actor", *roles)}
    costs = Costs(tuple(draw(LINES) for _ in range(pp)), prefill=own, message_s=draw(st.sampled_from((0.0, 5e-5, 1e-3))))
    return Round(1, steps, (decode,) if decode else (), prefill), site, costs


@pytest.mark.parametrize("name", ["woven", "intra"])
@settings(deadline=None, max_examples=150)
@given(case=shared())
def test_stage_by_stage_is_micro_batch_by_micro_batch(name: str, case: tuple[Round, Site, Costs]) -> None:
    round_, site, costs = case
    layout, found = _OneByOne(round_, site, costs), GENERATORS[name](round_, site, costs).actions
    if name == "intra":
        layout.place_scorers()
        layout.free.close()
        layout.place_actor()
    else:
        layout.place_actor()
        layout.place_scorers()
    expected = layout.schedule().actions
    assert isinstance(found, Timetable) and isinstance(expected, Timetable)
    for team, times in expected.times.items():
        assert (found.times[team].starts == times.starts).all() and (found.times[team].placed == times.placed).all(), team


def plain_s(work: Work, cut: Cut, costs: Costs) -> float:
    """The formula of `cut.py`, one number after the other."""
    stages, m, message_s = range(work.pp), cut.micro_batches, costs.message_s if work.pp > 1 else 0.0
    busy = [costs.decode_at(p)(-(-work.num_sequences // m)) for p in stages]
    busy[-1] += costs.sample(-(-work.num_sequences // m))
    lap = max(m * max(busy), sum(busy) + work.pp * message_s)
    first = [sum(busy[: p + 1]) + p * message_s + (m - 1) * max(busy[: p + 1]) for p in stages]
    gap, left = [lap - m * each for each in busy], [float(work.steps - 1)] * work.pp
    ends, drain = [(work.steps - 1) * lap + each for each in first], [0.0] * work.pp
    for role, tokens in work.prefill_tokens.items():
        count = -(-tokens // cut.prefill_tokens)

        def takes(number: float, role: str = role) -> list[float]:
            own = [costs.prefill_at(role, p)(round(number)) for p in stages]
            return [*own[:-1], own[-1] + costs.score(round(number))]

        mean, longest = takes(tokens / count), takes(min(tokens, cut.prefill_tokens))
        begun, before, ready, arrived = left[0], count, 0.0, first[0]
        for p in stages:
            missed = max(0, math.ceil((arrived + longest[p] - first[p] - gap[p]) / lap - ROUNDING))
            arrived = max(arrived, first[p] + missed * lap) + longest[p] + message_s
            each = math.trunc(gap[p] / longest[p] + ROUNDING)
            left[p] = max(0.0, min(left[p], begun - missed))
            woven = min(before, math.trunc(left[p] * each + ROUNDING))
            left[p] -= woven / each if woven else 0.0
            if woven < count:
                start = max(ends[p], ready if woven == before else 0.0)
                ready = start + mean[p] + message_s
                ends[p] = start + (count - woven) * mean[p]
                drain[p] = max(drain[p], sum(mean[p + 1 :]) + (work.pp - 1 - p) * message_s)
            before = woven
    return max(end + late for end, late in zip(ends, drain, strict=True))


@settings(deadline=None, max_examples=200)
@given(data=st.data(), pp=st.sampled_from((1, 2, 3, 8)), sequences=st.integers(1, 300), steps=st.integers(1, 128))
def test_a_cut_takes_what_the_formula_says(data: st.DataObject, pp: int, sequences: int, steps: int) -> None:
    own = st.builds(Linear, st.floats(1e-5, 5e-3), st.floats(1e-6, 1e-4))
    tokens = data.draw(st.dictionaries(st.sampled_from(("reference", "critic", "reward")), st.integers(1, 10**5)))
    lines = {role: tuple(data.draw(own) for _ in range(pp)) for role in tokens}
    costs = Costs(tuple(data.draw(own) for _ in range(pp)), prefill=lines, message_s=data.draw(st.sampled_from((0.0, 5e-5))))
    cut = Cut(data.draw(st.integers(1, 2 * pp)), data.draw(st.integers(1, 8192)))
    work = Work(sequences, steps, pp, tokens)
    assert predict_s(work, cut, costs) == pytest.approx(plain_s(work, cut, costs), rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(1, 3), groups=st.integers(1, 5))
def test_sequences_that_end_together_count_as_one_after_the_other(data: st.DataObject, size: int, groups: int) -> None:
    """At the end of each clock, as nobody asks before; with groups, and with some that the batch has to wait for."""
    order = data.draw(st.permutations(range(size * groups)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(order)))) | {0, len(order)})
    forced = data.draw(st.sets(st.integers(0, groups - 1)))
    members = [g * size + i for g in forced for i in range(size)]
    target = data.draw(st.integers(0, groups + 1))
    waits = [(members, data.draw(st.integers(1, len(forced))))] if forced else []
    together, apart = (Readiness(target, 0, set(order), waits, size) for _ in range(2))
    for start, end in pairwise(cuts):
        together.finish(*order[start:end])
        for seq_id in order[start:end]:
            apart.finish(seq_id)
        assert together.ready == apart.ready
    with pytest.raises(AssertionError, match=f"sequence {order[0]} one is not decoded"):
        together.finish(order[0])
