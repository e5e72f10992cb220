"""What a run saves in `models/` is what another run, or `oppo convert`, starts from by a role's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.hf_source import open_directory
from tests.e2e.test_resume import checkpoints, stop
from tests.support.hf import tensors_of
from tests.support.layouts import DEEP, STEADY_ADAM, assert_same, deep
from tests.support.ppo import SHAPE, Workspace, run_ppo_ranks


def test_roles_of_a_checkpoint_are_models_to_start_from(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    tied = SHAPE | {"tie_word_embeddings": True}
    changes = {"actor.init": tied, "actor.train": {"tp": 1, "pp": 2}, "placement": {"mode": "colocated", "actor": {"tp": 2}}}
    first = workspace.config("first", steps=1, **changes, **{"checkpoint.every_steps": 1})
    outcome = run_ppo_ranks(first)
    models = next((tmp_path / "runs" / "first" / "checkpoints").glob("step-000001")) / "models"
    for role, target in (("actor", "causal-lm"), ("critic", "reward")):
        assert main(["convert", str(models / role), str(tmp_path / role), "--as", target]) == 0
        saved = tensors_of(tmp_path / "runs" / "first" / "weights" / role)
        found = tensors_of(tmp_path / role)
        assert saved.keys() == found.keys() and all(bool((saved[name] == found[name]).all()) for name in saved)
    with pytest.raises(CheckpointError, match="models of a run"):
        open_directory(models.parent)
    started = workspace.config("second", steps=1, **{"actor.optimizer.lr": 1e-30, "critic.optimizer.lr": 1e-30})
    started["actor"] = {"checkpoint": str(models / "actor"), "optimizer": {"lr": 1e-30}}
    started["critic"] = {"checkpoint": str(models / "critic"), "optimizer": {"lr": 1e-30}}
    again = run_ppo_ranks(started)
    for name, tensor in outcome.actor.items():
        assert bool((again.actor[name] == tensor).all()), name


ODD = DEEP | {"vocab_size": 283}
ROLES: dict[str, Any] = {
    "actor": {"init": ODD | {"tie_word_embeddings": True}, "optimizer": STEADY_ADAM},
    "critic": {"init": ODD, "init_seed": 5, "optimizer": STEADY_ADAM},
    "reward": {"init": ODD, "init_seed": 6},
}


def odd(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    return deep(workspace, name, **{"overlap.intra": True}) | ROLES | changes


@pytest.mark.long
def test_layouts_resumed_one_from_the_other_are_the_plain_run(tmp_path: Path) -> None:
    """TP2 that trains as replicas, stopped within a rollout; then trained as TP2; then one process, which has a row less."""
    workspace = Workspace.create(tmp_path)
    plain = run_ppo_ranks(odd(workspace, "plain"))
    assert max(max(tokens) for tokens in plain.tokens().values()) >= 142, "the second shard is drawn from"
    config = odd(workspace, "odd", placement={"mode": "colocated", "actor": {"tp": 2}, "scorer": {"tp": 2}})
    config["actor"] = config["actor"] | {"train": {"tp": 1, "dp": 2}}
    config["checkpoint"] = {"every_steps": 1}
    stop(config, rounds=9)
    assert len(checkpoints(config)) > 1, "a step has been trained"
    config["actor"]["train"] = {"tp": 2, "pp": 1}
    config["checkpoint"] = {"resume": True, "every_steps": 1}
    stop(config, rounds=4)
    config["actor"].pop("train")
    config["placement"] = {"mode": "single"}
    assert_same(run_ppo_ranks(config), plain)


def test_exports_have_the_rows_of_the_vocabulary_alone(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    config = odd(workspace, "tp", steps=1, placement={"mode": "colocated", "actor": {"tp": 2}})
    config["checkpoint"] = {"every_steps": 1}
    outcome = run_ppo_ranks(config)
    assert outcome.actor["model.embed_tokens.weight"].shape == (283, 32)
    saved = Path(config["run_dir"]) / "checkpoints" / "step-000001" / "models"
    assert main(["convert", str(saved / "actor"), str(tmp_path / "actor"), "--as", "causal-lm"]) == 0
    found = tensors_of(tmp_path / "actor")
    assert all(bool((found[name] == tensor).all()) for name, tensor in outcome.actor.items())
