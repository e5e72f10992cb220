"""Another run, or `oppo convert`, starts from a role's folder in a run's `models/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.hf_source import open_directory
from tests.support.hf import tensors_of
from tests.support.ppo import SHAPE, Workspace, run_ppo_ranks


def test_roles_of_a_checkpoint_are_models_to_start_from(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    tied = SHAPE | {"tie_word_embeddings": True, "vocab_size": 283}  # which tensor ranks do not divide
    changes = {"actor.init": tied, "actor.train": {"tp": 1, "pp": 2}, "placement": {"mode": "colocated", "actor": {"tp": 2}}}
    first = workspace.config("first", steps=1, **changes, **{"checkpoint.every_steps": 1})
    outcome = run_ppo_ranks(first)
    assert outcome.actor["model.embed_tokens.weight"].shape == (283, 32), "no row more than the vocabulary has"
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
