"""Whole runs with adapters: base weights and reference stay, layouts train alike, a resumed run is the undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.placements import world_size
from oppo_megatron.layout.role_memory import train_holdings
from oppo_megatron.mcore.weights.hf_source import open_directory
from oppo_megatron.preflight.validate import train_problems
from tests.e2e.test_resume import assert_bit_equal
from tests.support.configs import run_of
from tests.support.layouts import DEEP, STEADY_ADAM, assert_same, deep
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

LORA = {"rank": 4, "alpha": 16.0}
ROLES = ("actor", "critic")


def configured(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    config = deep(workspace, name, **changes)
    for role in ROLES:
        config[role] |= {"lora": LORA, "optimizer": STEADY_ADAM}
    return config


def shared(config: dict[str, Any]) -> Outcome:
    ranks = world_size(run_of(config))
    assert any(run_ranks(ranks, "tests.e2e.jobs:train_with_a_shared_reference", config=config))
    return read_outcome(Path(config["run_dir"]))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return shared(configured(workspace, "plain"))


@pytest.fixture(scope="module")
def weights(workspace: Workspace, plain: Outcome) -> Path:
    return Path(configured(workspace, "plain")["run_dir"]) / "weights" / "actor"


def test_adapters_are_trained_and_the_reference_is_where_they_began(plain: Outcome, weights: Path) -> None:
    assert max(line["logprob_gap"] for line in plain.metrics) < 1e-4, "decoding computes as training"
    assert abs(plain.metrics[0]["kl_mean"]) < 1e-5 < abs(plain.metrics[-1]["kl_mean"]), "of the actor without adapters"
    trained = [*plain.actor.values(), *plain.critic.values()]
    assert len(trained) == 2 * 4 * 7 * 2 + 1 and all(bool(tensor.any()) for tensor in trained)
    written = json.loads((weights / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["task_type"]) == (4, 16, "CAUSAL_LM")


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": {"mode": "disaggregated", "actor": {"pp": 2}, "reference": "actor"}},
        {"placement": {"mode": "colocated", "actor": {"tp": 2}}, "actor.train": {"tp": 1, "pp": 2, "dp": 1}},
    ],
    ids=["PP2 and reference | 1", "decodes TP2, trains PP2"],
)
def test_a_reference_with_the_actor_shares_its_weights(workspace: Workspace, plain: Outcome, changes: dict[str, Any]) -> None:
    assert_same(shared(configured(workspace, f"shared-{len(changes)}", **changes)), plain)


@pytest.mark.parametrize("mode", ["single", "disaggregated"])
def test_a_null_reference_begins_with_the_adapters_that_are_given(
    workspace: Workspace, plain: Outcome, weights: Path, mode: str
) -> None:
    config = configured(workspace, f"given-{mode}", steps=2, placement={"mode": mode})
    config["actor"] |= {"lora": LORA | {"adapter": str(weights)}}
    assert train_problems(run_of(config)) == []
    first, second = run_ppo_ranks(config).metrics
    assert abs(first["kl_mean"]) < 1e-4 < abs(second["kl_mean"]), "0 at first, and the reference stays where it was"
    assert abs(plain.metrics[-1]["kl_mean"]) > 1e-2, "the adapters do something"
    shared = {each.role: each.memory.weights for each in train_holdings(run_of(config), on_cpu=True)}
    assert (0 < shared["reference"] < shared["actor"] / 2) == (mode == "single"), "beside the actor adapters alone"


def test_a_resumed_run_is_the_undisturbed_one(workspace: Workspace, plain: Outcome) -> None:
    config = configured(workspace, "resumed", **{"checkpoint.every_steps": 1})
    assert run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=4, rank=0) == [False]
    config["checkpoint"]["resume"] = True
    assert_bit_equal(run_ppo_ranks(config), plain)
    newest = max((Path(config["run_dir"]) / "checkpoints").glob("step-*"))
    saved = FileSystemReader(newest / "models").read_metadata().state_dict_metadata
    assert all("_lora." in key or key.endswith("critic.output_layer.weight") for key in saved), "adapters and no base weights"
    assert sum(".exp_avg_sq." in key for key in saved) == 2 * 7 * 2 + 1
    with pytest.raises(CheckpointError, match="adapters"):
        open_directory(newest / "models" / "actor")


def test_adapters_are_counted_and_checked_before_models_are_built(workspace: Workspace, tmp_path: Path) -> None:
    config = TrainConfig(**configured(workspace, "counted"))
    full = TrainConfig(**deep(workspace, "counted"))
    (with_adapters, without) = ({each.role: each.memory for each in train_holdings(each, on_cpu=True)} for each in (config, full))
    assert with_adapters["actor"].optimizer < without["actor"].optimizer / 2
    assert with_adapters["reference"].weights == with_adapters["reference"].packed == 0 < without["reference"].weights
    trainable = 4 * 4 * sum(a + b for a, b in _sizes())
    assert with_adapters["actor"].gradients == 4 * trainable
    broken = configured(workspace, "broken")
    broken["actor"]["lora"] = LORA | {"adapter": str(tmp_path)}
    assert any("adapter_config.json" in problem for problem in train_problems(TrainConfig(**broken)))


def _sizes() -> list[tuple[int, int]]:
    """(inputs, outputs) of each projection of DEEP."""
    hidden, ffn, keys = DEEP["hidden_size"], DEEP["intermediate_size"], DEEP["hidden_size"] // 2
    return [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)] + [(hidden, ffn)] * 3
