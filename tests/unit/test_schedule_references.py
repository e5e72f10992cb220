"""Plans in arrays are those that plain loops find, one unit, cut or sequence after the other."""

from __future__ import annotations

import math
from itertools import count, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.overcommit.readiness import Readiness
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.cut import ROUNDING, Cut, Work, predict_s
from oppo_megatron.schedule.weaving.generators import Gaps

UNITS = st.tuples(st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 60), st.integers(1, 9))


@given(units=st.lists(UNITS, max_size=25))
def test_each_unit_is_placed_at_the_first_time_that_is_free_on_all_its_ranks(
    units: list[tuple[tuple[int, ...], int, int]],
) -> None:
    gaps, busy = Gaps((0, 1)), set[tuple[int, int]]()
    for ranks, ready, duration in units:
        times = (set(product(ranks, range(start, start + duration))) for start in count(ready))
        taken = next(each for each in times if not each & busy)
        assert gaps.place(ranks, ready, duration) == min(time for _, time in taken)
        busy |= taken


def plain_s(work: Work, cut: Cut, costs: Costs) -> float:
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
    """Nobody asks before the end of a clock; with groups, and with some that the batch has to wait for."""
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
