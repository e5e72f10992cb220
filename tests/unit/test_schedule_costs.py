"""The cost meter finds the lines that samples were drawn from; the cut is the best of those it may choose from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.schedule.actions import Op
from oppo_megatron.schedule.costs import CostMeter, Costs, Linear
from oppo_megatron.schedule.cut import Cut, Work, choose_cut, even_portions, predict_s

ROLES = ("actor", "critic")
TRUE = Costs(
    decode=Linear(3e-3, 1e-4),
    sample=Linear(0.0, 2e-5),
    prefill={"actor": Linear(1e-3, 4e-5), "critic": Linear(2e-3, 8e-5)},
    score=Linear(5e-4, 0.0),
    message_s=1e-5,
)
KINDS = [
    (Op.DECODE, "actor", TRUE.decode),
    (Op.SAMPLE, "actor", TRUE.sample),
    (Op.PREFILL, "actor", TRUE.prefill_of("actor")),
    (Op.PREFILL, "critic", TRUE.prefill_of("critic")),
    (Op.SCORE, "critic", TRUE.score),
]


def fed(meter: CostMeter, sizes: list[int]) -> CostMeter:
    for op, role, line in KINDS:
        for n in sizes:
            meter.add(op, role, n, line(n))
    return meter


def assert_close(line: Linear, expected: Linear) -> None:
    assert (line.fixed_s, line.per_token_s) == pytest.approx((expected.fixed_s, expected.per_token_s), abs=1e-8)


@given(st.lists(st.integers(1, 4096), min_size=4, max_size=20, unique=True))
def test_exact_samples_give_the_true_lines(sizes: list[int]) -> None:
    found = fed(CostMeter(ROLES), sizes).costs(Costs())
    for line, expected in [
        (found.decode, TRUE.decode),
        (found.sample, TRUE.sample),
        (found.score, TRUE.score),
        *((found.prefill_of(role), TRUE.prefill_of(role)) for role in ROLES),
    ]:
        for n in (min(sizes), max(sizes)):
            assert line(n) == pytest.approx(expected(n), rel=1e-3, abs=1e-9)


def test_least_squares_equals_the_normal_equations_of_noisy_samples() -> None:
    rng, meter = random.Random(0), CostMeter(ROLES)
    pairs = [(n, 0.01 + 1e-4 * n + rng.gauss(0, 1e-3)) for n in (8, 16, 24, 32, 48, 64)]
    for n, seconds in pairs:
        meter.add(Op.DECODE, "actor", n, seconds)
    mean_n, mean_t = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    slope = sum((n - mean_n) * (t - mean_t) for n, t in pairs) / sum((n - mean_n) ** 2 for n, _ in pairs)
    assert_close(meter.costs(Costs()).decode, Linear(mean_t - slope * mean_n, slope))


def test_ranks_add_their_vectors() -> None:
    both = fed(fed(CostMeter(ROLES), [10, 20, 30]), [40, 50])
    one, other = fed(CostMeter(ROLES), [10, 20, 30]), fed(CostMeter(ROLES), [40, 50])
    summed = [a + b for a, b in zip(one.to_vector(), other.to_vector(), strict=True)]
    assert summed == pytest.approx(both.to_vector())
    assert_close(CostMeter(ROLES, summed).costs(Costs()).decode, TRUE.decode)
    with pytest.raises(ValueError, match="same roles"):
        CostMeter(("actor",), summed)


def test_lines_are_never_negative() -> None:
    falling, steep = CostMeter(ROLES), CostMeter(ROLES)
    for n in (10, 20, 30, 40):
        falling.add(Op.DECODE, "actor", n, 1.0 - 0.01 * n)
        steep.add(Op.DECODE, "actor", n, 0.1 * n - 0.5)
    assert_close(falling.costs(Costs()).decode, Linear(0.75, 0.0))
    through_origin = sum(n * (0.1 * n - 0.5) for n in (10, 20, 30, 40)) / sum(n * n for n in (10, 20, 30, 40))
    assert_close(steep.costs(Costs()).decode, Linear(0.0, through_origin))


def test_too_few_samples_leave_the_fallback_and_one_size_scales_it() -> None:
    fallback = Costs(decode=Linear(1.0, 0.1), message_s=0.25)
    meter = CostMeter(ROLES)
    for _ in range(3):
        meter.add(Op.DECODE, "actor", 10, 4.0)
    assert meter.costs(fallback) == Costs(
        decode=fallback.decode, prefill=dict.fromkeys(ROLES, fallback.default_prefill), message_s=0.25
    )
    meter.add(Op.DECODE, "actor", 10, 4.0)
    assert_close(meter.costs(fallback).decode, Linear(2.0, 0.2))


def test_what_is_forgotten_counts_less() -> None:
    meter = CostMeter(ROLES)
    for n in (10, 20, 30, 40):
        meter.add(Op.DECODE, "actor", n, 1.0)
    meter.forget(0.0)
    assert meter.to_vector() == [0.0] * len(meter.to_vector())
    fed(meter, [10, 20, 30, 40, 50])
    meter.forget(0.9)
    assert_close(meter.costs(Costs()).decode, TRUE.decode)


@given(st.integers(0, 70), st.integers(1, 20))
def test_even_portions(count: int, portions: int) -> None:
    parts = even_portions(range(count), portions)
    assert [i for part in parts for i in part] == list(range(count))
    assert len(parts) == min(portions, count)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1 and sizes[-1] >= 1


def test_prediction_by_hand() -> None:
    """2 stages, 3 steps; a lap of one micro-batch is 2 (1 + 0.5) + 0.3 = 3.3 s, its gap 2 s."""
    costs = Costs(Linear(1.0, 0.0), Linear(0.3, 0.0), {}, Linear(0.9, 0.0), Linear(0.1, 0.0), message_s=0.5)
    decode_only = Work(4, 3, 2, {})
    assert predict_s(decode_only, Cut(1, 10), costs) == pytest.approx(2 * 3.3 + 2.8)
    fits = Work(4, 3, 2, {"reward": 50})
    assert predict_s(fits, Cut(1, 10), costs) == pytest.approx(2 * 3.3 + 2.8)
    # two fit into each of three gaps; of 9 the last 3 come after decoding, and 1 s until the last stage has them
    assert predict_s(replace_tokens(fits, 90), Cut(1, 10), costs) == pytest.approx(2 * 3.3 + 2.8 + 3 + 1)


def replace_tokens(work: Work, tokens: int) -> Work:
    return Work(work.num_sequences, work.steps, work.pp, {"reward": tokens})


def test_one_stage_is_not_cut() -> None:
    assert choose_cut(Work(64, 32, 1, {"reward": 4096}), Costs(), 8192) == Cut(1, 8192)


def test_fewer_micro_batches_the_more_there_is_to_weave() -> None:
    cuts = [choose_cut(Work(64, 32, 8, {"reward": n}), Costs(), 8192, grain=32) for n in (0, 8192, 32768, 65536)]
    assert [cut.micro_batches for cut in cuts] == sorted((cut.micro_batches for cut in cuts), reverse=True)
    assert cuts[0].micro_batches > 2 * cuts[-1].micro_batches


def test_what_is_settled_is_kept() -> None:
    work = Work(64, 32, 4, {"reward": 4096})
    assert choose_cut(work, Costs(), 8192, micro_batches=3).micro_batches == 3
    assert choose_cut(work, Costs(), 8192, prefill_tokens=100).prefill_tokens == 100
    assert choose_cut(Work(0, 0, 4, {}), Costs(), 16, grain=500) == Cut(1, 16)
