"""KL's coefficient against the closed form of Ziegler et al. 2019, signals of hand-made chunks, early stopping, and guards."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.columns import columns_of
from oppo_megatron.config.evaluation import EarlyStopConfig
from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.control.estimates import Best, EarlyStop
from oppo_megatron.control.guards import CODE_SIZE, FIGURES, NO_BREACH, REMEDIES, RULES, Breach, Rules, decode, first
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.control.occupancy import Occupancy, group_length_gap, length_gap
from oppo_megatron.records import Prompt, Rollout


def adaptive(coefficient: float = 0.1, target: float = 6.0) -> KLController:
    return KLController(KLConfig(coefficient=coefficient, target=target))


def test_a_fixed_coefficient_never_moves() -> None:
    controller = KLController(KLConfig(coefficient=0.05))
    assert [controller.observe(kl) for kl in (0.0, 100.0, -3.0)] == [0.05] * 3


@pytest.mark.parametrize(
    ("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-2.0, -0.2)]
)
def test_one_update_of_the_coefficient(kl: float, error: float) -> None:
    controller = adaptive()
    assert controller.observe(kl) == pytest.approx(0.1 * (1 + 0.1 * error), rel=1e-12)
    assert controller.value == controller.observe(6.0)


@given(kls=st.lists(st.floats(-100, 100), max_size=30))
def test_the_coefficient_stays_positive_and_moves_the_right_way(kls: list[float]) -> None:
    controller = adaptive()
    for kl in kls:
        before = controller.value
        after = controller.observe(kl)
        assert 0.97 * before < after < 1.03 * before
        assert (after > before) == (kl > 6.0) or abs(kl - 6.0) < 1e-9


def test_a_proportional_plant_settles_at_the_target() -> None:
    """The controller finds beta = 1 / target where KL falls as the coefficient rises (KL = 1 / beta)."""
    controller = adaptive(coefficient=3.0, target=4.0)
    for _ in range(2000):
        controller.observe(1 / controller.value)
    assert controller.value == pytest.approx(0.25, rel=1e-6)


def test_the_coefficient_is_resumed() -> None:
    first, second = adaptive(), adaptive()
    first.observe(20.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value != 0.1
    fixed = KLController(KLConfig(coefficient=0.3))
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.3


def row(seq_id: int, num_tokens: int, finish_clock: int | None = None, offset: int = 0) -> ChunkRow:
    zeros = [0.0] * num_tokens
    return ChunkRow(seq_id, offset, [0] * num_tokens, zeros, zeros, version=0, finish_clock=finish_clock)


def rollout(num_tokens: int) -> Rollout:
    return Rollout(Prompt(0, 0, "", (1,)), 0, tokens=[0] * num_tokens)


def test_the_tail_is_what_the_longest_response_leaves_empty() -> None:
    occupancy = Occupancy(10)
    occupancy.record(Chunk(0, 10, []))
    assert occupancy.tail_waste == 0, "nothing was decoded"
    occupancy.record(Chunk(1, 14, [row(0, 1, 11), row(1, 2, 12), row(2, 4)]))
    assert occupancy.tail_waste == 1 - 7 / (4 * 3)
    occupancy.record(Chunk(2, 20, [row(2, 6, 20, offset=4)]))
    assert occupancy.tail_waste == 1 - 13 / (10 * 3)


def test_a_sequence_that_enters_within_a_chunk_takes_an_empty_place() -> None:
    """Row 2 runs from clock 2 to 4, after row 0 has ended: two places, never empty."""
    occupancy = Occupancy(0)
    occupancy.record(Chunk(1, 4, [row(0, 2, 2), row(1, 4), row(2, 2, 4)]))
    assert occupancy.tail_waste == 0


def test_a_clock_that_passes_by_is_no_waste() -> None:
    occupancy = Occupancy(0)
    occupancy.record(Chunk(1, 3, [row(0, 3, 3)]), 0)
    occupancy.record(Chunk(2, 12, [row(1, 4, 12)]), 8)
    assert (occupancy.num_steps, occupancy.tail_waste) == (7, 0)


def test_length_gap_is_a_share_of_the_submitted_length() -> None:
    short, long = [rollout(10), rollout(20)], [rollout(60)]
    assert length_gap(short, []) == 0
    assert length_gap(short, long) == pytest.approx(1 - 15 / 30)
    assert length_gap(long, short) == pytest.approx(1 - 60 / 30)
    assert length_gap(long, [rollout(0)]) == -1.0


def test_the_gap_within_groups_is_to_the_longest_of_each() -> None:
    """Two groups: (10 + 30) / 2 of 30, and all as long as the longest; without groups there is nothing to wait for."""
    batch = [rollout(10), rollout(30), rollout(8), rollout(8)]
    lengths = columns_of(batch).response_tokens
    assert [group_length_gap(lengths, size) for size in (2, 4)] == pytest.approx([(1 / 3 + 0) / 2, 1 - 14 / 30])
    assert group_length_gap(lengths, 1) is None


def run(values: list[float], **settings: object) -> EarlyStop:
    stop = EarlyStop(EarlyStopConfig.model_validate({"metric": "accuracy", **settings}))
    for step, value in enumerate(values):
        assert not stop.due, f"due before step {step}"
        stop.observe(step, value)
    return stop


@pytest.mark.parametrize(
    ("values", "settings", "due", "best"),
    [
        ([0.1, 0.2, 0.3], {"patience": 1}, False, Best(2, 0.3)),
        ([0.1, 0.2, 0.2], {"patience": 1}, True, Best(1, 0.2)),
        ([0.1, 0.2, 0.1, 0.15], {"patience": 3}, False, Best(1, 0.2)),
        ([0.1, 0.2, 0.1, 0.15, 0.2], {"patience": 3}, True, Best(1, 0.2)),
        ([3.0, 2.0, 2.5], {"patience": 1, "metric": "min accuracy"}, True, Best(1, 2.0)),
        ([math.nan, 0.1, math.nan], {"patience": 2}, False, Best(1, 0.1)),
    ],
)
def test_stopping_is_due_after_as_many_values_that_are_no_better(
    values: list[float], settings: dict[str, object], due: bool, best: Best
) -> None:
    stop = run(values, **settings)
    assert (stop.due, stop.best) == (due, best)


def test_early_stopping_continues_from_its_state() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.1]
    whole = run(values, patience=3)
    first = run(values[:3], patience=3)
    second = EarlyStop(first.config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in (3, 4):
        second.observe(step, values[step])
    assert second.state_dict() == whole.state_dict() and second.due
    assert second.describe() == "stopped early at step 4: accuracy 0.1, no better in 3 evaluations; best 0.3 at step 1"


ALL = {"kl_mean": 10, "ratio_max": 4, "ess": 0.5}
SOUND = {
    "kl_mean": 1.0, "ratio_max": 2.0, "ess": 0.9, "logprob_gap": 1e-6, "grad_norm": 3.0, "critic_loss": 0.1, "lr": 0
}  # fmt: skip


def rules(gap: float | None = 1e-4, **settings: Any) -> Rules:
    return Rules(GuardsConfig(**settings), gap)


@pytest.mark.parametrize(
    ("changed", "rule", "says"),
    [
        ({"kl_mean": 10.1}, "kl_mean", "kl_mean is 10.1, above guards.kl_mean 10"),
        ({"ratio_max": 4.5}, "ratio_max", "ratio_max is 4.5, above guards.ratio_max 4"),
        ({"ess": 0.49}, "ess", "ess is 0.49, below guards.ess 0.5"),
        ({"logprob_gap": 0.1}, "logprob_gap", "differs by 1.00e-01 between decoding and training"),
        ({"logprob_gap": 1e-3, "logprob_gap_judged": 2e-4}, "logprob_gap", "differs by 2.00e-04"),
        ({"logprob_gap": 0.1, "logprob_gap_judged": 1e-4}, None, ""),
        ({"critic_loss": math.inf}, "non_finite", "critic_loss is inf, no finite number"),
        ({"kl_mean": math.nan, "ess": 0.1}, "non_finite", "kl_mean is nan"),
        ({"kl_mean": 10.0, "ratio_max": 4.0, "ess": 0.5, "logprob_gap": 1e-4, "lr": math.inf}, None, ""),
    ],
)
def test_what_breaks_a_rule(changed: dict[str, float], rule: str | None, says: str) -> None:
    breach = rules(**ALL).check(SOUND | changed)
    assert (breach and breach.rule) == rule
    if breach is not None:
        assert says in breach.reason and REMEDIES[breach.rule] in breach.message


def test_without_limits_only_what_is_not_finite_breaks_a_rule() -> None:
    far = dict.fromkeys(FIGURES, 1e30) | {"ess": 1e-30}
    assert rules(gap=None).check(far) is None
    breach = rules(gap=None).check(far | {"actor_loss": math.nan})
    assert breach is not None and breach.figure == "actor_loss"


@pytest.mark.parametrize(("action", "agree", "undo"), [("stop", False, False), ("skip", True, True), ("rollback", True, False)])
def test_when_ranks_agree_on_updates_and_take_them_back(action: str, agree: bool, undo: bool) -> None:
    held = rules(action=action)
    assert (held.agree_on_updates, held.undo_updates) == (agree, undo)


@given(st.sampled_from(RULES), st.sampled_from(FIGURES), st.floats(), st.none() | st.floats(allow_nan=False))
def test_a_breach_survives_its_way_to_other_ranks(rule: str, figure: str, value: float, limit: float | None) -> None:
    breach = Breach(rule, figure, value, limit)
    code = breach.encode()
    assert len(code) == CODE_SIZE and str(decode(code)) == str(breach)
    assert decode(NO_BREACH) is None


def test_the_first_breach_is_taken() -> None:
    ess, ratio = Breach("ess", "ess", 0.1, 0.2), Breach("ratio_max", "ratio_max", 9.0, 4.0)
    assert first([None, ess, ratio]) is ess and first([None]) is None
