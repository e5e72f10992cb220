"""The cost meter finds the lines that samples were drawn from; cuts and plans in arrays are those that plain loops find."""

import math
import random
from itertools import count, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.overcommit.ahead import Readiness
from oppo_megatron.schedule.actions import Op
from oppo_megatron.schedule.checking.timeline import COMPUTE, simulate
from oppo_megatron.schedule.rounds import Growth, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs, Linear
from oppo_megatron.schedule.weaving.cut import ROUNDING, Cut, Work, choose_cut, even_ends, predict_s
from oppo_megatron.schedule.weaving.generators import Gaps, woven

STAGES = {"actor": 2, "critic": 3}
TRUE = Costs(
    decode=(Linear(3e-3, 1e-4), Linear(9e-3, 5e-4)), sample=Linear(0.0, 2e-5), score=Linear(5e-4, 0.0), message_s=1e-5,
    prefill={"actor": (Linear(1e-3, 4e-5), Linear(1e-3, 9e-5)),
        "critic": (Linear(2e-3, 8e-5), Linear(2e-3, 7e-5), Linear(4e-3, 1e-4))},
)  # fmt: skip


def kinds(costs: Costs) -> list[tuple[Op, str, int, Linear]]:
    decodes = [(Op.DECODE, "actor", stage, costs.decode_at(stage)) for stage in range(2)]
    prefills = [(Op.PREFILL, role, stage, costs.prefill_at(role, stage)) for role, pp in STAGES.items() for stage in range(pp)]
    return [*decodes, (Op.SAMPLE, "actor", 1, costs.sample), *prefills, (Op.SCORE, "critic", 2, costs.score)]


def fed(meter: CostMeter, sizes: list[int]) -> CostMeter:
    for op, role, stage, line in kinds(TRUE):
        for n in sizes:
            meter.add(op, role, stage, n, line(n))
    return meter


def assert_close(line: Linear, expected: Linear) -> None:
    assert (line.fixed_s, line.per_token_s) == pytest.approx((expected.fixed_s, expected.per_token_s), abs=1e-8)


@given(st.lists(st.integers(1, 4096), min_size=4, max_size=20, unique=True))
def test_exact_samples_give_the_true_line_of_every_stage(sizes: list[int]) -> None:
    found = fed(CostMeter(STAGES), sizes).costs(Costs())
    for (*_, line), (*_, expected) in zip(kinds(found), kinds(TRUE), strict=True):
        for n in (min(sizes), max(sizes)):
            assert line(n) == pytest.approx(expected(n), rel=1e-3, abs=1e-9)


def test_least_squares_equals_the_normal_equations_no_line_is_negative_and_ranks_add_their_vectors() -> None:
    rng, meter = random.Random(0), CostMeter(STAGES)
    pairs = [(n, 0.01 + 1e-4 * n + rng.gauss(0, 1e-3)) for n in (8, 16, 24, 32, 48, 64)]
    for n, seconds in pairs:
        meter.add(Op.DECODE, "actor", 0, n, seconds)
    mean_n, mean_t = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    slope = sum((n - mean_n) * (t - mean_t) for n, t in pairs) / sum((n - mean_n) ** 2 for n, _ in pairs)
    assert_close(meter.costs(Costs()).decode_at(0), Linear(mean_t - slope * mean_n, slope))
    falling, steep = CostMeter(STAGES), CostMeter(STAGES)
    for n in (10, 20, 30, 40):
        falling.add(Op.DECODE, "actor", 0, n, 1.0 - 0.01 * n)
        steep.add(Op.DECODE, "actor", 0, n, 0.1 * n - 0.5)
    assert_close(falling.costs(Costs()).decode_at(0), Linear(0.75, 0.0))
    through_origin = sum(n * (0.1 * n - 0.5) for n in (10, 20, 30, 40)) / sum(n * n for n in (10, 20, 30, 40))
    assert_close(steep.costs(Costs()).decode_at(0), Linear(0.0, through_origin))
    both = fed(fed(CostMeter(STAGES), [10, 20, 30]), [40, 50])
    one, other = fed(CostMeter(STAGES), [10, 20, 30]), fed(CostMeter(STAGES), [40, 50])
    summed = [a + b for a, b in zip(one.to_vector(), other.to_vector(), strict=True)]
    assert summed == pytest.approx(both.to_vector())
    assert_close(CostMeter(STAGES, summed).costs(Costs()).decode_at(1), TRUE.decode_at(1))
    assert len(summed) == len(CostMeter(STAGES).to_vector()) == 5 * (2 + 2 + 2 + 3)  # sample, score; decode; prefill
    with pytest.raises(ValueError, match="same roles"):
        CostMeter({"actor": 2}, summed)


def test_few_samples_scale_the_fallback_and_a_stage_with_too_few_has_the_line_of_all_stages() -> None:
    fallback = Costs(decode=Linear(1.0, 0.1), message_s=0.25)
    meter = CostMeter(STAGES)
    prefill = {role: (fallback.default_prefill,) * pp for role, pp in STAGES.items()}
    unseen = Costs(decode=(fallback.decode_at(0),) * 2, prefill=prefill, message_s=0.25)
    assert meter.empty and meter.costs(fallback) == unseen
    for n in (5, 10, 15):  # three samples make no line of their own: they have one slope, which is not taken
        meter.add(Op.DECODE, "actor", 0, n, 4.0)
    assert_close(meter.costs(fallback).decode_at(0), Linear(2.0, 0.2))
    assert not meter.empty and meter.costs(fallback).prefill == unseen.prefill
    for _ in range(4):
        meter.add(Op.PREFILL, "actor", 0, 10, 4.4)
    assert_close(meter.costs(fallback).prefill_at("actor", 0), Linear(2e-3 * 2000, 2e-5 * 2000))
    meter = CostMeter(STAGES)
    for n in (10, 20, 30, 40):
        meter.add(Op.PREFILL, "critic", 0, n, 1.0 + n)
        meter.add(Op.PREFILL, "critic", 2, n, 3.0 + 3 * n)
    meter.add(Op.PREFILL, "critic", 1, 25, 52.0)  # on the line between the two
    found = meter.costs(Costs())
    for stage, expected in enumerate([Linear(1.0, 1.0), Linear(2.0, 2.0), Linear(3.0, 3.0)]):
        assert_close(found.prefill_at("critic", stage), expected)
    assert found.prefill_at("actor", 1) == Costs().default_prefill
    for _ in range(4):
        meter.add(Op.PREFILL, "critic", 1, 24, 100.0)
    one_size = meter.costs(Costs()).prefill_at("critic", 1)  # 4 samples of about one size: through their mean
    assert one_size(24) == pytest.approx(90, rel=0.05)


def test_what_is_joined_later_counts_more() -> None:
    """Two lots of samples, the first at half its weight: as if the second had been seen twice."""
    late, twice = CostMeter(STAGES), CostMeter(STAGES)
    late.add(Op.SAMPLE, "actor", 1, 10, 1.0)
    first = late.take()
    assert late.empty and not any(late.to_vector())
    for n, seconds in ((10, 2.0), (20, 5.0)):
        late.add(Op.SAMPLE, "actor", 1, n, seconds)
    second = late.take()
    late.join(first)
    late.join(second, keep=0.5)
    for vector in (first, second, second):
        twice.join(vector)
    assert [2 * value for value in late.to_vector()] == pytest.approx(twice.to_vector())


@given(st.integers(0, 70), st.integers(1, 20))
def test_even_ends(count: int, portions: int) -> None:
    ends = even_ends(count, portions)
    assert ends[0] == 0 and ends[-1] == count
    assert len(ends) - 1 == min(portions, count)
    sizes = [end - start for start, end in pairwise(ends)]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1 and sizes[-1] >= 1


@given(st.lists(st.integers(0, 20), min_size=2, max_size=5), st.integers(0, 9), st.integers(0, 9), *[st.integers(1, 6)] * 2)
def test_predicted_decoding_is_the_dry_run_s(seconds: list, sample: int, message: int, micro_batches: int, steps: int) -> None:
    costs = Costs(tuple(Linear(float(s), 0.0) for s in seconds), Linear(float(sample), 0.0), message_s=float(message))
    pp = len(seconds)
    site = Site({"actor": RolePlacement(tuple(range(pp)), pp=pp)})
    round_ = Round(1, steps, (tuple((Growth(m, 1, steps),) for m in range(micro_batches)),))
    timeline = simulate(add_communication(woven(round_, site, costs), round_, site), round_, site, costs)
    computed = max(s.end_s for own in timeline.spans.values() for s in own if s.action.op in COMPUTE)
    assert predict_s(Work(micro_batches, steps, pp, {}), Cut(micro_batches, 1), costs) == pytest.approx(computed)


def test_a_scorer_of_another_layout_has_its_costs_by_depth() -> None:
    """Two stages of a scorer beside four of the actor: the first two cost as its first, the others as its second."""
    first, second = (Linear(1.0, 0.0),), (Linear(5.0, 0.0),)
    costs = [Costs(prefill={"reward": lines}) for lines in (first + second, first * 2 + second * 2)]
    two, four = (predict_s(Work(8, 4, 4, {"reward": 70}), Cut(2, 10), each) for each in costs)
    assert two == four


def test_fewer_micro_batches_the_more_there_is_to_weave_one_stage_is_not_cut_and_what_is_settled_is_kept() -> None:
    cuts = [choose_cut(Work(64, 32, 8, {"reward": n}), Costs(), 8192, grain=32) for n in (0, 8192, 32768, 65536)]
    assert [cut.micro_batches for cut in cuts] == sorted((cut.micro_batches for cut in cuts), reverse=True)
    assert cuts[0].micro_batches > 2 * cuts[-1].micro_batches
    assert choose_cut(Work(64, 32, 1, {"reward": 4096}), Costs(), 8192) == Cut(1, 8192)
    work = Work(64, 32, 4, {"reward": 4096})
    assert choose_cut(work, Costs(), 8192, micro_batches=3).micro_batches == 3
    assert choose_cut(work, Costs(), 8192, prefill_tokens=100).prefill_tokens == 100
    assert choose_cut(Work(0, 0, 4, {}), Costs(), 16, grain=500) == Cut(1, 16)


@given(units=st.lists(st.tuples(st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 60), st.integers(1, 9)), max_size=25))
def test_each_unit_is_placed_at_the_first_time_free_on_all_its_ranks(units: list[tuple[tuple[int, ...], int, int]]) -> None:
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


@settings(max_examples=200)
@given(data=st.data(), pp=st.sampled_from((1, 2, 3, 8)), sequences=st.integers(1, 300), steps=st.integers(1, 128))
def test_a_cut_takes_what_the_formula_says(data: st.DataObject, pp: int, sequences: int, steps: int) -> None:
    own = st.builds(Linear, st.floats(1e-5, 5e-3), st.floats(1e-6, 1e-4))
    tokens = data.draw(st.dictionaries(st.sampled_from(("reference", "critic", "reward")), st.integers(1, 10**5)))
    lines = {role: tuple(data.draw(own) for _ in range(pp)) for role in tokens}
    costs = Costs(tuple(data.draw(own) for _ in range(pp)), prefill=lines, message_s=data.draw(st.sampled_from((0.0, 5e-5))))
    cut = Cut(data.draw(st.integers(1, 2 * pp)), data.draw(st.integers(1, 8192)))
    work = Work(sequences, steps, pp, tokens)
    assert predict_s(work, cut, costs) == pytest.approx(plain_s(work, cut, costs), rel=1e-9)


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
    with pytest.raises(AssertionError, match=f"sequence {order[0]}: not decoded"):
        together.finish(order[0])
