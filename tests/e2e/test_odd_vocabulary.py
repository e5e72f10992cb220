"""A vocabulary that the tensor ranks do not divide: whole runs are those of one process, and can be resumed on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from tests.e2e.test_resume import checkpoints, stop
from tests.support.hf import tensors_of
from tests.support.layouts import DEEP, STEADY_ADAM, assert_same, deep
from tests.support.ppo import Workspace, run_ppo_ranks

ODD = DEEP | {"vocab_size": 283}
ROLES: dict[str, Any] = {
    "actor": {"init": ODD | {"tie_word_embeddings": True}, "optimizer": STEADY_ADAM},
    "critic": {"init": ODD, "optimizer": STEADY_ADAM},
    "reward": {"init": ODD},
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
