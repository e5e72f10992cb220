"""Groups and presets on the same loop: groups stay whole, whatever is carried; the matrix compares layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import named_roles, role_placements, world_size
from oppo_megatron.train.logs.journal import lost_gradient
from tests.e2e.matrix import grouped as of_groups
from tests.support.layouts import assert_same, deep
from tests.support.ppo import Workspace, run_ppo_ranks

CRITIC_FREE = [name for name, preset in PRESETS.items() if preset.baseline != "critic"]
CARRIED: dict[str, Any] = {
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2},
}
BY_RULE = {"reward": None, "rewards": [{"kind": "verifier", "name": "arithmetic"}], "filter": None}


def grouped(workspace: Workspace, name: str, preset: str, size: int, **changes: Any) -> dict[str, Any]:
    """16 responses a step in groups of `size`, in two minibatches, scored by a reward model."""
    return deep(workspace, name, **of_groups(preset, size, **changes))


@pytest.mark.parametrize("preset", CRITIC_FREE)
@pytest.mark.long
def test_every_preset_is_the_same_streamed(workspace: Workspace, preset: str) -> None:
    one = run_ppo_ranks(grouped(workspace, f"{preset}-plain", preset, 8))
    changes = {"placement": {"mode": "disaggregated"}, "overlap.intra": True}
    assert_same(run_ppo_ranks(grouped(workspace, f"{preset}-streamed", preset, 8, **changes)), one)


@pytest.mark.parametrize("preset", CRITIC_FREE)
def test_a_preset_trains_with_carried_groups(workspace: Workspace, preset: str) -> None:
    """Batches have whole groups, side by side; nothing is lost or trained twice; the weights move."""
    size = max(2, min(PRESETS[preset].group_size, 4))
    config = grouped(workspace, f"{preset}-carried", preset, size, **CARRIED, steps=3)
    run = run_ppo_ranks(config)
    batches = run.batches()
    trained = [seq_id for batch in batches for seq_id in batch]
    assert len(trained) == len(set(trained)) == 48
    greedy = PRESETS[preset].baseline == "greedy"
    whole = size + greedy  # sequence ids of a prompt
    for batch in batches:
        assert [seq_id % whole for seq_id in batch] == list(range(size)) * (16 // size)
    assert [row["seq_id"] for row in run.greedy] == [i + size for i in trained[::size]] * greedy
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some groups should be carried"
    deferrals: dict[int, set[int]] = {}
    for row in [*run.rollouts, *run.greedy]:
        deferrals.setdefault(row["seq_id"] // whole, set()).add(row["deferrals"])
    assert all(len(of_group) == 1 for of_group in deferrals.values())
    dropped = sum(line.get("groups_dropped") or 0 for line in run.metrics)
    assert (PRESETS[preset].filter is not None or not dropped) and len(deferrals) == 48 // size
    assert max(deferrals) < len(deferrals) + dropped, "no prompt beyond the last that was needed"
    has_reference = PRESETS[preset].kl["mode"] != "none"
    assert ("reference" in named_roles(TrainConfig(**config))) == has_reference
    assert all((line["kl_mean"] is None) == (not has_reference) for line in run.metrics)
    assert all(line["grad_norm"] > 0 for line in run.metrics)


def test_ratios_of_responses_keep_the_gradient_of_carried_rows(workspace: Workspace) -> None:
    """Against the policies that sampled them, most ratios of carried responses leave GSPO's range before an update."""
    common = CARRIED | {"steps": 3, "ppo.minibatches": 1}
    decoupled, behaviour = (
        run_ppo_ranks(grouped(workspace, f"gspo-{name}", "gspo", 4, **common, **changes)).metrics
        for name, changes in (("decoupled", {}), ("behaviour", {"ppo.staleness": "behaviour"}))
    )
    assert sum(line["stale_token_fraction"] for line in decoupled) > 0, "some responses should be carried"
    assert not any(line["lost_gradient_stale"] or line["clip_fraction"] for line in decoupled)
    assert max(line["lost_gradient_stale"] for line in behaviour) > 0.2
    assert not any(line["lost_gradient_fresh"] for line in behaviour)
    assert "set ppo.staleness to decoupled" in str([lost_gradient(line, "behaviour") for line in behaviour])
    assert not any(lost_gradient(line, "decoupled") for line in decoupled)


def test_rounding_takes_no_gradient_from_ratios_of_responses(workspace: Workspace) -> None:
    """GSPO's range is narrower than what bfloat16 rounds between decoding and training; nothing is clipped at a ratio of 1."""
    config = grouped(workspace, "gspo-bfloat16", "gspo", 4, **{"runtime.dtype": "bfloat16", "ppo.minibatches": 1, "steps": 1})
    (line,) = run_ppo_ranks(config).metrics
    assert line["logprob_gap"] > 4e-4 and line["clip_fraction"] == line["lost_gradient_fresh"] == 0


def test_a_rule_without_a_reference_leaves_no_scorer(workspace: Workspace) -> None:
    """No role but the actor has a rank, a model or a message, in one process, and on ranks of the actor alone."""
    config = grouped(workspace, "alone", "dapo", 4, **CARRIED, **BY_RULE)
    assert list(role_placements(TrainConfig(**config))) == ["actor"]
    one = run_ppo_ranks(config)
    spread = grouped(
        workspace, "alone-pp2", "dapo", 4, **CARRIED, **BY_RULE, placement={"mode": "disaggregated", "actor": {"pp": 2}}
    )
    assert world_size(TrainConfig(**spread)) == 2
    assert_same(run_ppo_ranks(spread), one)
    assert not [name for line in one.metrics for name in line if name.startswith("critic_")]


def test_another_group_size_cannot_go_on(workspace: Workspace, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = grouped(workspace, "resized", "grpo", 4, **CARRIED, steps=1)
    run_ppo_ranks(config)
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(config | {"steps": 2}))
    assert main(["train", str(path), "--resume", "rollout.group_size=2"]) == 2
    assert "rollout.group_size is 2, but the checkpoint's run has 4" in capsys.readouterr().err
