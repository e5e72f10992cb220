"""An algorithm without a critic on the same loop: what it leaves, and what is refused; tests/replay makes its updates again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.preflight.settings import check_train
from tests.support.layouts import TOLERANCE, WITHOUT_CRITIC, deep
from tests.support.ppo import SHAPE, Outcome, Workspace, run_ppo_ranks, weight_distance
from tools.replay import main as replay
from tools.replay import read_rejected


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Iterator[Outcome]:
    yield run_ppo_ranks(deep(workspace, "plain", **WITHOUT_CRITIC))


def test_several_responses_a_prompt_are_those_of_rows_that_stand_as_often(workspace: Workspace) -> None:
    """Without a baseline and carried rollouts only the order in a batch tells groups from rows one after the other."""
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines(keepends=True)
    repeated = workspace.root / "each-twice.jsonl"
    repeated.write_text("".join(row * 2 for row in rows))
    common: dict[str, Any] = {**WITHOUT_CRITIC, "data.shuffle": False, "steps": 2, "ppo.minibatches": 1}
    ours = run_ppo_ranks(deep(workspace, "two-responses", **common, **{"rollout.group_size": 2}))
    plain = run_ppo_ranks(deep(workspace, "two-rows", **common, **{"data.path": str(repeated)}))
    assert ours.tokens() == plain.tokens()
    assert [sorted(batch) for batch in ours.batches()] == [sorted(batch) for batch in plain.batches()]
    assert weight_distance(ours.actor, plain.actor) < TOLERANCE
    answers: dict[str, list[list[int]]] = {}
    for row in sorted(ours.rollouts, key=lambda row: row["seq_id"]):
        answers.setdefault(row["prompt"], []).append(row["tokens"])
    pairs = [each for each in answers.values() if len(each) == 2]
    assert len(pairs) >= 4 and all(first != second for first, second in pairs)


def test_nothing_of_a_critic_is_written(workspace: Workspace, plain: Outcome) -> None:
    run = Path(deep(workspace, "plain")["run_dir"])
    assert not plain.critic and not (run / "weights" / "critic").exists()
    assert not [name for line in plain.metrics for name in line if name.startswith("critic_")]
    assert all(line["value_mean"] is None and line["explained_variance"] is None for line in plain.metrics)


def test_a_verifier_alone_needs_no_rank_of_scorers(workspace: Workspace) -> None:
    """No reward model, and the reference on the actor's rank: a single process is the whole run."""
    config = deep(workspace, "verifier", **WITHOUT_CRITIC, placement={"mode": "disaggregated", "reference": "actor"})
    config |= {"reward": None, "rewards": [{"kind": "verifier", "name": "arithmetic"}]}
    assert world_size(TrainConfig(**config)) == 1
    assert len(run_ppo_ranks(config).metrics) == 3


def test_a_step_that_a_guard_takes_back_can_be_replayed(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    guards = {"ratio_max": 1.0001, "action": "skip"}
    config = workspace.config("guard", **WITHOUT_CRITIC, guards=guards, steps=2)
    assert all(line["skipped"] for line in run_ppo_ranks(config).metrics)
    path = Path(config["run_dir"]) / "rejected" / "step-1.safetensors"
    assert read_rejected(path).scored.values_T is None
    assert replay([str(path)]) == 0
    out = capsys.readouterr().out
    assert "the replay: ratio_max is" in out and "critic_loss" not in out
    with_critic = ["algorithm.preset=ppo", f"critic.init={json.dumps(SHAPE)}"]
    assert replay([str(path), *with_critic]) == 2
    assert "algorithm.baseline is none, but algorithm.preset ppo is what trains a critic" in capsys.readouterr().err
    assert replay([str(path), *with_critic, "algorithm.baseline=critic"]) == 2
    assert "the batch has no values, but algorithm.preset ppo updates a critic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critic": None}, "critic is missing, but algorithm.preset ppo trains one; add it"),
        ({"algorithm": {"preset": "reinforce_pp"}}, "critic is given, but algorithm.preset reinforce_pp has none; remove"),
    ],
    ids=["ppo without", "reinforce_pp with"],
)
def test_a_critic_is_there_exactly_where_the_algorithm_has_one(workspace: Workspace, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainConfig(**workspace.config("refused", **changes))


def test_settings_that_only_a_critic_gives_a_meaning_are_refused(workspace: Workspace) -> None:
    config = TrainConfig(**workspace.config("refused", **WITHOUT_CRITIC, **{"ppo.gae_lambda": 0.9}))
    assert "ppo.gae_lambda is 0.9, but algorithm.preset reinforce_pp has no critic, and nothing reads it; remove it" in (
        check_train(config)
    )
