"""Runs of a deeper tiny model, whose draws stay clear of rounding, and what makes two of them the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ppo import SHAPE, Outcome, Workspace, weight_distance

WITHOUT_CRITIC: dict[str, Any] = {"algorithm": {"preset": "reinforce_pp"}, "critic": None}
TOLERANCE = 2e-4
SEED = 23
DEEP = SHAPE | {"num_hidden_layers": 4}
STEADY_ADAM = {"lr": 2e-3, "eps": 1e-4}
Layout = tuple[int, int, int]


def deep(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    """The plain configuration, with a SEED whose draws are at least 2e-3 of probability away from a border between two tokens."""
    roles: dict[str, Any] = {
        "actor": {"init": DEEP, "optimizer": STEADY_ADAM},
        "critic": {"init": DEEP, "optimizer": STEADY_ADAM},
        "reward": {"init": DEEP},
    }
    return workspace.config(name, **(roles | {"seed": SEED, "rollout.top_k": 6} | changes))


def parallel(layout: Layout) -> dict[str, int]:
    return dict(zip(("tp", "pp", "dp"), layout, strict=True))


def assert_same(outcome: Outcome, plain: Outcome) -> None:
    """The same tokens and batches, and weights within TOLERANCE (absolute; they move by about 1e-2)."""
    assert outcome.tokens() == plain.tokens()
    assert outcome.batches() == plain.batches()
    assert weight_distance(outcome.actor, plain.actor) < TOLERANCE
    assert weight_distance(outcome.critic, plain.critic) < TOLERANCE
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4
    for ours, theirs in zip(outcome.metrics, plain.metrics, strict=True):
        assert ours["actor_loss"] == pytest.approx(theirs["actor_loss"], abs=1e-4)
        assert ("critic_loss" in ours) == ("critic_loss" in theirs) == bool(plain.critic)
        if plain.critic:
            assert ours["critic_loss"] == pytest.approx(theirs["critic_loss"], rel=1e-3)
