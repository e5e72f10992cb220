"""The guards' rules: which figure breaks which, what comes first, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.control.guards import (
    CODE_SIZE,
    FIGURES,
    NO_BREACH,
    REMEDIES,
    RULES,
    Breach,
    Rules,
    decode,
    first,
)

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


@given(
    rule=st.sampled_from(RULES),
    figure=st.sampled_from(FIGURES),
    value=st.floats(),
    limit=st.none() | st.floats(allow_nan=False),
)
def test_a_breach_survives_its_way_to_other_ranks(rule: str, figure: str, value: float, limit: float | None) -> None:
    breach = Breach(rule, figure, value, limit)
    code = breach.encode()
    assert len(code) == CODE_SIZE and str(decode(code)) == str(breach)
    assert decode(NO_BREACH) is None


def test_the_first_breach_is_taken() -> None:
    ess, ratio = Breach("ess", "ess", 0.1, 0.2), Breach("ratio_max", "ratio_max", 9.0, 4.0)
    assert first([None, ess, ratio]) is ess and first([None]) is None
