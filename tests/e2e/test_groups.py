"""Groups and presets on the same loop: overlap, chunks, layouts and stops change nothing, and groups stay whole.

One start, one seed, two steps of responses in groups, against a run without overlap in one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import named_roles, role_placements, world_size
from oppo_megatron.train.logs.journal import lost_gradient
from tests.support.layouts import DEEP, STEADY_ADAM, assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

CRITIC_FREE = [name for name, preset in PRESETS.items() if preset.baseline != "critic"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "actor | scorers": {"mode": "disaggregated"},
    "PP2 | TP2": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}},
    "TP2, colocated": {"mode": "colocated", "actor": {"tp": 2}},
    "DP2 | DP2": {"mode": "disaggregated", "actor": {"dp": 2}, "scorer": {"dp": 2}},
}
CARRIED: dict[str, Any] = {
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2},
}
BY_RULE = {"reward": None, "rewards": [{"kind": "verifier", "name": "arithmetic"}], "filter": None}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("groups"))


def grouped(workspace: Workspace, name: str, preset: str, size: int, **changes: Any) -> dict[str, Any]:
    """16 responses a step in groups of `size`, in two minibatches, scored by a reward model."""
    common = {
        "algorithm": {"preset": preset}, "critic": None, "steps": 2,
        "rollout.batch_size": 16, "rollout.group_size": size, "ppo.kl": {}, "ppo.epochs": 1,
    }  # fmt: skip
    return deep(workspace, name, **(common | changes))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Iterator[Outcome]:
    yield run_ppo_ranks(grouped(workspace, "plain", "grpo", 4))


def test_the_plain_run_is_worth_comparing_with(plain: Outcome) -> None:
    assert len({len(row["tokens"]) for row in plain.rollouts}) > 4, "responses should end at different lengths"
    by_group: dict[int, set[tuple[int, ...]]] = {}
    for row in plain.rollouts:
        by_group.setdefault(row["seq_id"] // 4, set()).add(tuple(row["tokens"]))
    assert len(by_group) == 8 and max(map(len, by_group.values())) == 4, "members should draw other tokens"
    assert all(line["kl_mean"] is not None and line["value_mean"] is None for line in plain.metrics)


@pytest.mark.parametrize(
    "placement", [pytest.param(each, marks=pytest.mark.long) if "TP2, col" in each else each for each in LAYOUTS]
)
def test_streaming_in_any_layout_changes_nothing(workspace: Workspace, plain: Outcome, placement: str) -> None:
    name = "".join(c for c in placement if c.isalnum())
    changes = {"placement": LAYOUTS[placement], "overlap.intra": True}
    assert_same(run_ppo_ranks(grouped(workspace, name, "grpo", 4, **changes)), plain)


@pytest.fixture(scope="module")
def paired(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(grouped(workspace, "paired", "online_dpo", 4, **{"rollout.temperature": 0.9}))


ZERO_DELTA: dict[str, Any] = {"overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 0, "max": 0}}


@pytest.mark.parametrize("inter", [{}, ZERO_DELTA], ids=["intra", "both overlaps"])
@pytest.mark.parametrize(
    "placement", [each if each == "PP2 | TP2" else pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS]
)
def test_pairs_are_the_same_in_any_layout(
    workspace: Workspace, paired: Outcome, placement: str, inter: dict[str, Any]
) -> None:
    """Best against worst of four, as without overlap in one process; each pair on one replica."""
    name = "paired-" + "".join(c for c in placement if c.isalnum()) + str(len(inter))
    changes = {"placement": LAYOUTS[placement], "overlap.intra": True, "rollout.temperature": 0.9} | inter
    run = run_ppo_ranks(grouped(workspace, name, "online_dpo", 4, **changes))
    assert_same(run, paired)
    for ours, theirs in zip(run.metrics, paired.metrics, strict=True):
        assert (ours["pairs"], ours["ties"]) == (theirs["pairs"], theirs["ties"]) == (4, 0)
        for figure in ("pair_margin", "implicit_reward_chosen", "implicit_reward_rejected", "chosen_reward_mean"):
            assert ours[figure] == pytest.approx(theirs[figure], abs=1e-4), figure
        assert ours["pair_accuracy"] == theirs["pair_accuracy"]
        assert ours["chosen_reward_mean"] > ours["rejected_reward_mean"]
        assert ours["kl_mean"] is ours["kl_coefficient"] is None, "draws and reference are of two temperatures"
        assert ours["ess"] == pytest.approx(1.0) and "ratio_max" not in ours


@pytest.mark.parametrize("chunk", [1, 64])
def test_the_chunk_size_changes_nothing(workspace: Workspace, plain: Outcome, chunk: int) -> None:
    changes = {"overlap.intra": True, "overlap.chunk.tokens": chunk} | ZERO_DELTA
    assert_same(run_ppo_ranks(grouped(workspace, f"chunk-{chunk}", "grpo", 4, **changes)), plain)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("preset", CRITIC_FREE)
@pytest.mark.long
def test_every_preset_and_group_size_is_the_same_streamed(workspace: Workspace, preset: str, size: int) -> None:
    if size == 1 and (PRESETS[preset].baseline not in ("none", "greedy") or PRESETS[preset].scale == "group_std"):
        size = 4  # one response is compared with nothing
    name = f"{preset}-{size}"
    one = run_ppo_ranks(grouped(workspace, f"{name}-plain", preset, size))
    changes = {"placement": {"mode": "disaggregated"}, "overlap.intra": True}
    assert_same(run_ppo_ranks(grouped(workspace, f"{name}-streamed", preset, size, **changes)), one)


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


@pytest.mark.parametrize("preset", ["grpo", pytest.param("online_dpo", marks=pytest.mark.long)])
def test_a_run_stopped_within_a_group_goes_on_to_the_bit(workspace: Workspace, preset: str) -> None:
    whole = run_ppo_ranks(grouped(workspace, f"whole-{preset}", preset, 4, **CARRIED, steps=3))
    config = grouped(workspace, f"stopped-{preset}", preset, 4, **CARRIED, steps=3)
    ended = run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=3, rank=0)
    assert ended == [False], "the run was over before it was to stop"
    held = [json.loads(line) for line in next(Path(config["run_dir"]).glob("checkpoints/*/rollouts.jsonl")).open()]
    groups: dict[int, set[bool]] = {}
    for row in held:
        groups.setdefault(row["seq_id"] // 4, set()).add(row["finish_clock"] is None)
    assert {True, False} in groups.values(), "a group should have members that have ended, and others"
    again = run_ppo_ranks(config | {"checkpoint": {"resume": True}})
    assert again.tokens() == whole.tokens() and again.batches() == whole.batches()
    assert weight_distance(again.actor, whole.actor) == 0


def test_another_group_size_cannot_go_on(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = grouped(workspace, "resized", "grpo", 4, **CARRIED, steps=1)
    run_ppo_ranks(config)
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(config | {"steps": 2}))
    assert main(["train", str(path), "--resume", "rollout.group_size=2"]) == 2
    assert "rollout.group_size is 2, but the checkpoint's run has 4" in capsys.readouterr().err


@pytest.mark.long
def test_adapters_and_bfloat16_in_groups(workspace: Workspace) -> None:
    lora = {"actor": {"init": DEEP, "optimizer": STEADY_ADAM, "lora": {"rank": 4}}, "runtime.dtype": "bfloat16"}
    run = run_ppo_ranks(grouped(workspace, "lora", "rloo", 4, **CARRIED, **lora))
    assert len(run.metrics) == 2 and all(line["grad_norm"] > 0 for line in run.metrics)
    assert run.actor and all("lora_" in name for name in run.actor)
