"""The KL controller against the closed form of Ziegler et al. 2019."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.control.kl_controller import KLController


def adaptive(coefficient: float = 0.1, target: float = 6.0) -> KLController:
    return KLController(KLConfig(coefficient=coefficient, target=target))


def test_fixed_never_moves() -> None:
    controller = KLController(KLConfig(coefficient=0.05))
    assert [controller.observe(kl) for kl in (0.0, 100.0, -3.0)] == [0.05] * 3


@pytest.mark.parametrize(
    ("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-2.0, -0.2)]
)
def test_one_update(kl: float, error: float) -> None:
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
    """Where KL falls as the coefficient rises (KL = 1 / beta), the controller finds beta = 1 / target."""
    controller = adaptive(coefficient=3.0, target=4.0)
    for _ in range(2000):
        controller.observe(1 / controller.value)
    assert controller.value == pytest.approx(0.25, rel=1e-6)


def test_resume() -> None:
    first, second = adaptive(), adaptive()
    first.observe(20.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value != 0.1
    fixed = KLController(KLConfig(coefficient=0.3))
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.3
