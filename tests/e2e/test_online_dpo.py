"""Online DPO beside what else a run may have: a filter, adapters, and rewards that no model gives.

Each on one rank without overlap, and streamed on ranks of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.preflight.settings import check_train
from tests.e2e.test_groups import grouped
from tests.support.layouts import DEEP, STEADY_ADAM, assert_same
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

SIZE, EVERY, LONGEST = 4, 14, 40
STREAMED: dict[str, Any] = {"placement": {"mode": "disaggregated"}, "overlap.intra": True}
BY_LENGTH: dict[str, Any] = {
    "reward": None,
    "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": LONGEST}],
}
"""A rule alone: the shorter response is the better one, and those that were cut all tie."""
FILTERED: dict[str, Any] = BY_LENGTH | {
    "filter": "reward",
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1},
    "overlap.backfill": EVERY,
    "overlap.chunk.tokens": EVERY,
}
LORA: dict[str, Any] = {"actor": {"init": DEEP, "optimizer": STEADY_ADAM, "lora": {"rank": 4}}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("online-dpo"))


def both(workspace: Workspace, name: str, size: int, **changes: Any) -> tuple[dict[str, Any], Outcome, Outcome]:
    """The settings, the run on one rank, and the streamed one."""
    changes = {"ppo.entropy_coefficient": 0.0} | changes
    config = grouped(workspace, name, "online_dpo", size, **changes)
    assert check_train(TrainConfig(**config)) == []
    streamed = grouped(workspace, f"{name}-streamed", "online_dpo", size, **changes | STREAMED)
    return config, run_ppo_ranks(config), run_ppo_ranks(streamed)


def groups_of(run: Outcome, size: int) -> list[list[float]]:
    """Rewards of each trained group."""
    return [[row["reward"] for row in run.rollouts[i : i + size]] for i in range(0, len(run.rollouts), size)]


def test_a_rule_alone_says_which_response_is_the_better_one(workspace: Workspace) -> None:
    """No reward model has a rank; pairs that tie are told, and the others are trained."""
    config, one, streamed = both(workspace, "rule", 2, **BY_LENGTH)
    assert named_roles(TrainConfig(**config)).keys() == {"actor", "reference"}
    assert_same(streamed, one)
    assert all(row["reward"] == pytest.approx(-len(row["tokens"]) / LONGEST) for row in one.rollouts)
    ties = sum(len(set(rewards)) == 1 for rewards in groups_of(one, 2))
    assert 0 < ties == sum(line["ties"] for line in one.metrics) < 16
    assert all(line["pairs"] + line["ties"] == 8 and line["grad_norm"] > 0 for line in one.metrics)


def test_a_filter_drops_ties_before_they_are_trained(workspace: Workspace) -> None:
    """Whole batches of pairs, whatever is streamed; the verdicts are those of the metric that pairs are chosen by."""
    _, one, streamed = both(workspace, "filtered", 2, **FILTERED)
    assert_same(streamed, one)
    assert sum(line["groups_dropped"] for line in one.metrics) > 0
    assert [(line["pairs"], line["ties"]) for line in one.metrics] == [(8, 0)] * len(one.metrics)
    assert all(len(set(rewards)) == 2 for rewards in groups_of(one, 2))


def test_adapters_are_trained_against_the_model_without_them(workspace: Workspace) -> None:
    """So the first margin is 0, and what is written is the adapter's alone."""
    _, one, streamed = both(workspace, "lora", SIZE, **LORA, **{"steps": 3, "ppo.minibatches": 1})
    assert_same(streamed, one)
    assert one.actor and all("lora_" in name for name in one.actor)
    first, *_, last = one.metrics
    assert first["pair_margin"] == pytest.approx(0, abs=1e-5) and abs(last["pair_margin"]) > 1e-4
