"""The guards' rules: which figure breaks which, what comes first, and what is said of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.guards import GuardsConfig
from oppo_megatron.control.guards import (
    ACTIONS,
    CODE_SIZE,
    FIGURES,
    NO_BREACH,
    REMEDIES,
    RULES,
    Breach,
    Rules,
    decode,
    gravest,
)

ALL = {
    "kl_mean": {"limit": 10, "action": "skip"},
    "ratio_max": {"limit": 4, "action": "stop"},
    "ess": {"limit": 0.5, "action": "skip"},
    "logprob_gap": {"action": "skip"},
}
SOUND = {
    "kl_mean": 1.0, "ratio_max": 2.0, "ess": 0.9, "logprob_gap": 1e-6, "grad_norm": 3.0, "critic_loss": 0.1, "lr": 0
}  # fmt: skip


def rules(gap: float | None = 1e-4, **settings: Any) -> Rules:
    return Rules(GuardsConfig(**settings), gap)


@pytest.mark.parametrize(
    ("changed", "rule", "action", "says"),
    [
        ({"kl_mean": 10.1}, "kl_mean", "skip", "kl_mean is 10.1, above guards.kl_mean.limit 10"),
        ({"ratio_max": 4.5}, "ratio_max", "stop", "ratio_max is 4.5, above guards.ratio_max.limit 4"),
        ({"ess": 0.49}, "ess", "skip", "ess is 0.49, below guards.ess.limit 0.5"),
        ({"logprob_gap": 0.1}, "logprob_gap", "skip", "differs by 1.00e-01 between decoding and training"),
        ({"logprob_gap": 1e-3, "logprob_gap_judged": 2e-4}, "logprob_gap", "skip", "differs by 2.00e-04"),
        ({"logprob_gap": 0.1, "logprob_gap_judged": 1e-4}, None, None, ""),
        ({"critic_loss": math.inf}, "non_finite", "stop", "critic_loss is inf, no finite number"),
        ({"kl_mean": math.nan, "ess": 0.1}, "non_finite", "stop", "kl_mean is nan"),
        ({"ess": 0.1, "ratio_max": 9.0}, "ratio_max", "stop", "ratio_max"),  # what stops comes before what skips
        ({"kl_mean": 10.0, "ratio_max": 4.0, "ess": 0.5, "logprob_gap": 1e-4, "lr": math.inf}, None, None, ""),
    ],
)
def test_what_breaks_a_rule(changed: dict[str, float], rule: str | None, action: str | None, says: str) -> None:
    breach = rules(**ALL).check(SOUND | changed)
    assert (breach and breach.rule, breach and breach.action) == (rule, action)
    if breach is not None:
        assert says in breach.reason and REMEDIES[breach.rule] in breach.message


def test_without_limits_only_what_is_not_finite_breaks_a_rule() -> None:
    far = dict.fromkeys(FIGURES, 1e30) | {"ess": 1e-30}
    assert rules(gap=None).check(far) is None
    breach = rules(gap=None, non_finite="skip").check(far | {"actor_loss": math.nan})
    assert breach is not None and (breach.action, breach.figure) == ("skip", "actor_loss")


@given(
    rule=st.sampled_from(RULES),
    figure=st.sampled_from(FIGURES),
    value=st.floats(),
    limit=st.none() | st.floats(allow_nan=False),
    action=st.sampled_from(ACTIONS),
)
def test_a_breach_survives_its_way_to_other_ranks(
    rule: str, figure: str, value: float, limit: float | None, action: Any
) -> None:
    breach = Breach(rule, figure, value, limit, action)
    code = breach.encode()
    assert len(code) == CODE_SIZE and str(decode(code)) == str(breach)
    assert decode(NO_BREACH) is None


def test_the_gravest_breach_is_the_first_that_stops() -> None:
    skip, stop = Breach("ess", "ess", 0.1, 0.2, "skip"), Breach("ratio_max", "ratio_max", 9.0, 4.0, "stop")
    back = Breach("kl_mean", "kl_mean", 9.0, 4.0, "rollback")
    assert gravest([None, skip, back, stop]) is stop and gravest([None, skip]) is skip and gravest([None]) is None
    assert gravest([skip, back, None]) is back


@pytest.mark.parametrize(
    ("settings", "gap", "undo", "agree"),
    [
        ({}, 1e-4, False, False),
        ({"non_finite": "skip"}, None, True, True),
        ({"non_finite": "rollback"}, 1e-4, False, True),
        ({"kl_mean": {"limit": 1, "action": "skip"}}, 1e-4, False, False),  # known before the update
        ({"kl_mean": {"limit": 1, "action": "rollback"}}, 1e-4, False, False),
        ({"ratio_max": {"action": "skip"}}, 1e-4, False, False),
        ({"ratio_max": {"limit": 3, "action": "skip"}}, None, True, True),
        ({"ess": {"limit": 0.2, "action": "skip"}}, None, True, True),
        ({"ess": {"action": "rollback"}}, 1e-4, False, False),
        ({"ess": {"limit": 0.2, "action": "rollback"}}, 1e-4, False, True),
        ({"logprob_gap": {"action": "skip"}}, None, False, False),
        ({"logprob_gap": {"action": "skip"}}, 1e-4, True, True),
    ],
)
def test_when_updates_may_have_to_be_taken_back_and_ranks_to_agree(
    settings: dict[str, Any], gap: float | None, undo: bool, agree: bool
) -> None:
    held = rules(gap, **settings)
    assert (held.undo_updates, held.agree_on_updates) == (undo, agree)
