"""Runs with carried rollouts against an independent implementation (`loop.py`, `formulas.py`): final weights, to 1e-5.
A new preset is a row of `recipe.PRESETS` and a case here."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.layout.placements import world_size
from tests.replay.runs import assert_replays, carrying, save_models
from tests.support.configs import run_of
from tests.support.ppo import STEADY_ADAM, WITHOUT_CRITIC, Outcome, Workspace, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

REPLICAS = {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}}
STAGED = {"placement": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}}}
APART = {"placement": {"mode": "disaggregated"}}
SCHEDULED = STEADY_ADAM | {"warmup_steps": 3, "decay": "cosine", "min_lr": 2e-4, "weight_decay": 0.1, "clip_grad": 0.5}
UNCLIPPED = STEADY_ADAM | {"decay": "linear", "clip_grad": 0.0, "betas": [0.8, 0.9]}
GAP = 1e-4


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any]
    choices: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "ppo": Case({"steps": 3, "ppo.entropy_coefficient": 0.01}),
    "reinforce_pp": Case(WITHOUT_CRITIC | {"ppo.minibatches": 1, "ppo.entropy_coefficient": 0.01}),
    "decoupled": Case({"ppo.staleness": "decoupled"}),
    "reinforce_pp, decoupled, replicas": Case(WITHOUT_CRITIC | {"ppo.staleness": "decoupled"} | REPLICAS),
    "replicas": Case(REPLICAS), "KL loss, k2": Case({"ppo.kl": {"mode": "loss", "estimator": "k2", "coefficient": 0.1}}),
    "KL loss, k3, decoupled, replicas": Case({"ppo.kl": {"mode": "loss", "estimator": "k3", "coefficient": 0.1},
        "ppo.staleness": "decoupled"} | REPLICAS),
    "KL penalty, k3, reinforce_pp": Case(WITHOUT_CRITIC | {"ppo.kl": {"estimator": "k3", "coefficient": 0.2}}),
    "scores shaped": Case({"ppo.reward_clip": 1.0, "ppo.reward_normalization": "running", "ppo.truncated": -1.0,
        "ppo.gae_lambda": 0.8}),
    "plain advantages and values": Case({"algorithm": {"scale": "none"}, "ppo.value_clip": 0.0}, {"scale": "none"}),
    "another reference": Case({"reference": {"checkpoint": "reference"}, "ppo.kl": {"estimator": "k2", "coefficient": 0.01}}),
    "top-k, top-p": Case({"rollout.top_k": 20, "rollout.top_p": 0.9}), "PP2 | TP2": Case(STAGED),
    "small micro-batches": Case(WITHOUT_CRITIC | {"runtime.micro_batch_tokens": 136, "ppo.staleness": "decoupled"}),
    "temperature": Case({"rollout.temperature": 0.7, "ppo.entropy_coefficient": 0.05}),
    "schedules, weight decay": Case({"actor.optimizer": SCHEDULED, "critic.optimizer": UNCLIPPED}),
    "critic warm-up": Case({"ppo.critic_warmup_steps": 2, "actor.optimizer": SCHEDULED}),
    "the update waits for the scores": Case(APART | {"overlap.without": ["scores"]}),
    "the next step waits for the critic": Case(APART | {"overlap.without": ["critic"]}), "the critic apart": Case(APART),
    "experts": Case({"actor.checkpoint": "experts", "critic.checkpoint": "experts-critic", "rollout.router_replay": False}),
    "experts, TP2 | PP2": Case({
        "actor.checkpoint": "experts", "critic.checkpoint": "experts-critic", "rollout.router_replay": False,
        "placement": {"mode": "disaggregated", "actor": {"tp": 2}, "scorer": {"pp": 2}}}),
    "backfill": Case(APART | {"overlap.backfill": True, "ppo.staleness": "decoupled"}),
}  # fmt: skip
IN_GROUPS: dict[str, Any] = {
    "critic": None, "ppo.kl": {}, "rollout.batch_size": 8, "rollout.group_size": 2,
    "overlap.delta": {"rule": "fixed", "initial": 4, "max": 4},
}  # fmt: skip
GROUPED: dict[str, dict[str, Any]] = {
    "grpo": {}, "dr_grpo": {}, "dapo": {"ppo.dual_clip": 3.0}, "gspo": {"ppo.clip": 0.1, "ppo.clip_high": 0.2}, "cispo": {},
    "rloo": {}, "reinforce_pp_baseline": {}, "magistral": {}, "remax": {},
}  # fmt: skip
"""Presets of groups, and what is set beside them."""
CHOSEN = {"gspo": {"clip_low": 0.1, "clip_high": 0.2}}
for preset, beside in GROUPED.items():
    common = IN_GROUPS | {"algorithm": {"preset": preset}} | beside
    CASES[preset] = Case(common, CHOSEN.get(preset, {}))
    CASES[f"{preset}, decoupled, replicas"] = Case(common | REPLICAS | {"ppo.staleness": "decoupled"}, CHOSEN.get(preset, {}))
PAIRED = IN_GROUPS | {"algorithm": {"preset": "online_dpo"}, "ppo.gamma": 1.0}
"""Pairs, in two minibatches and two epochs as all; a narrow `reward_clip` beside them makes ties."""
CASES |= {
    "online_dpo": Case(PAIRED | {"ppo.reward_clip": 0.2}),
    "online_dpo, replicas": Case(PAIRED | REPLICAS | {"ppo.reward_clip": 0.2, "dpo": {"beta": 0.5}}),
    "online_dpo, best of four, replicas": Case(
        PAIRED | REPLICAS | {"rollout.batch_size": 16, "rollout.group_size": 4, "rollout.temperature": 0.8}
    ),
    "online_dpo, PP2 | TP2, small micro-batches": Case(PAIRED | STAGED | {"runtime.micro_batch_tokens": 136}),
    "remax, one response, replicas": Case(WITHOUT_CRITIC | REPLICAS | {
        "algorithm": {"preset": "remax"}, "ppo.kl": {"coefficient": 0.2}, "ppo.reward_normalization": "running",
        "ppo.truncated": -0.5, "rollout.temperature": 0.8, "overlap.delta": {"rule": "fixed", "initial": 6, "max": 6},
    }),
}  # fmt: skip
WITHOUT_VERSIONS = ("critic warm-up",)
"""Where a step is no version of the policy."""
IN_MAKE_TEST = (
    "ppo", "online_dpo, best of four, replicas", "KL loss, k3, decoupled, replicas", "top-k, top-p", "reinforce_pp",
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(workspace: Workspace) -> Workspace:
    save_models(workspace.root)
    return workspace


def assert_carried(outcome: Outcome) -> None:
    assert sum(row["deferrals"] for row in outcome.rollouts) > 0, "some rollouts should be carried"
    assert any(len(set(row["versions"])) > 1 for row in outcome.rollouts), "some should be of several versions"


@pytest.mark.parametrize("name", [each if each in IN_MAKE_TEST else pytest.param(each, marks=pytest.mark.long) for each in CASES])
def test_a_run_is_what_its_records_come_to(workspace: Workspace, name: str) -> None:
    """A token's log-prob is that of its version's weights, by a forward pass without a cache."""
    case = CASES[name]
    config = carrying(workspace, "".join(c for c in name if c.isalnum()), case.changes)
    run_ppo_ranks(config)
    versions = name not in WITHOUT_VERSIONS
    outcome, replayed = assert_replays(config, versions, **case.choices)
    if versions:
        assert_carried(outcome)
        assert len(replayed.gaps) == config["steps"] and max(replayed.gaps) < GAP
    if config["ppo"]["minibatches"] == 1:
        assert [line["ess"] for line in outcome.metrics] == pytest.approx(replayed.sizes, abs=1e-5)
        assert min(replayed.sizes) < 1 - 1e-4
    if "ppo.reward_clip" in case.changes and case.changes.get("algorithm") == PAIRED["algorithm"]:
        assert all(sum(line[kind] for line in outcome.metrics) > 1 for kind in ("pairs", "ties"))


@pytest.mark.long
def test_over_a_cache_that_is_kept_log_probs_are_of_no_version_and_weights_are_the_replays(workspace: Workspace) -> None:
    """Recorded log-probs are those that were drawn from, so the update is the same arithmetic."""
    config = carrying(workspace, "kept", {"overlap.carry": "keep"})
    run_ppo_ranks(config)
    outcome, replayed = assert_replays(config, versions=True)
    assert sum(row["deferrals"] for row in outcome.rollouts) > 0
    assert max(replayed.gaps) > 10 * GAP, "a token drawn over the cache of older weights is of neither"


@pytest.mark.long
def test_rollouts_are_carried_over_the_end_of_an_epoch(workspace: Workspace) -> None:
    """Two passes over 16 prompts in batches of 6: the second begins within the third batch, and two rollouts are left over."""
    changes = {"steps": None, "epochs": 2, "data.max_rows": 16, "ppo.staleness": "decoupled"}
    config = carrying(workspace, "passes", changes)
    run_ppo_ranks(config)
    outcome, replayed = assert_replays(config, versions=True)
    assert_carried(outcome)
    assert max(replayed.gaps) < GAP
    assert [len(batch) for batch in outcome.batches()] == [6, 6, 6, 6, 6, 2]
    passes = [Counter(row["prompt"] for row in outcome.rollouts if row["seq_id"] // 16 == each) for each in (0, 1)]
    assert passes[0] == passes[1] and set(passes[0].values()) == {1}, "each prompt once a pass"
    (both,) = [number for number, batch in enumerate(outcome.batches(), 1) if min(batch) < 16 <= max(batch)]
    first = [row for row in outcome.rollouts if row["step"] == both and row["seq_id"] < 16]
    assert any(row["deferrals"] for row in first), "some of the first pass should be carried beside those of the second"


@pytest.mark.long
@pytest.mark.parametrize("placement", [{}, APART], ids=["one rank", "actor | scorers"])
def test_coefficient_and_learning_rates_go_on_after_a_stop(workspace: Workspace, placement: dict[str, Any]) -> None:
    changes = {
        "ppo.kl": {"coefficient": 0.2, "target": 0.05}, "ppo.reward_normalization": "running",
        "actor.optimizer": SCHEDULED, "critic.optimizer": UNCLIPPED,
    }  # fmt: skip
    config = carrying(workspace, f"stopped-{len(placement)}", changes | placement)
    world = world_size(run_of(config))
    for rounds in (8, 5):
        ended = run_ranks(world, "tests.e2e.jobs:train_until", config=config, rounds=rounds, rank=0)
        assert ended == [False] * world, "the run was over before it was to stop"
        config["checkpoint"] = {"resume": True}
        lines = (Path(config["run_dir"]) / "metrics.jsonl").read_text().splitlines()
        assert 0 < len(lines) < config["steps"], "a stop in the middle"
    run_ppo_ranks(config)
    outcome, replayed = assert_replays(config, versions=True)
    assert_carried(outcome)
    assert max(replayed.gaps) < GAP
    assert len(set(replayed.coefficients)) == config["steps"], "the coefficient should move"
    assert len({line["lr"] for line in read_outcome(Path(config["run_dir"])).metrics}) == config["steps"]
