"""Whole runs in bfloat16 and with adapters, and runs and conversions that start from a checkpoint's models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from oppo_megatron.cli.main import main
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.placements import world_size
from oppo_megatron.layout.role_memory import train_holdings
from oppo_megatron.mcore.weights.hf_source import open_directory
from oppo_megatron.preflight.validate import train_problems
from tests.e2e.test_resume import assert_bit_equal
from tests.support.configs import run_of
from tests.support.hf import tensors_of
from tests.support.ppo import DEEP, SHAPE, Layout, Outcome, Workspace, assert_same, deep, parallel, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

HALF = {"runtime.dtype": "bfloat16"}
SMALL = DEEP | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.15}
BATCH = 24
LIMIT = GuardsConfig().gap_limit("bfloat16", 1.0) or 0.0


def train(workspace: Workspace, name: str, **changes: Any) -> Outcome:
    """Two steps with few candidates a draw and short responses, so that many are drawn alike in both types."""
    roles = {"actor.init": SMALL, "critic.init": SMALL, "reward.init": SMALL}
    sizes = {"rollout.batch_size": BATCH, "rollout.max_response_tokens": 10, "rollout.top_k": 3, "steps": 2}
    rates = {"actor.optimizer": {"lr": 2e-4}, "critic.optimizer": {"lr": 1e-3}}
    return run_ppo_ranks(workspace.config(name, **roles, **sizes, **rates, **changes))


@pytest.fixture(scope="module")
def full(workspace: Workspace) -> Outcome:
    return train(workspace, "full")


@pytest.fixture(scope="module")
def half(workspace: Workspace) -> Outcome:
    return train(workspace, "half", **HALF)


def same(one: Outcome, other: Outcome) -> list[int]:
    return [i for i in one.batches()[0] if one.tokens()[i] == other.tokens()[i]]


def test_a_run_is_near_float32s_and_leaves_bfloat16(full: Outcome, half: Outcome) -> None:
    alike = same(full, half)
    assert len(alike) >= BATCH // 4
    ours, theirs = ({row["seq_id"]: row for row in outcome.rollouts} for outcome in (half, full))
    for i in alike:
        assert ours[i]["logprobs"] == pytest.approx(theirs[i]["logprobs"], abs=0.1)
        assert ours[i]["reward"] == pytest.approx(theirs[i]["reward"], abs=0.2)
    first, expected = half.metrics[0], full.metrics[0]
    assert first["actor_loss"] == pytest.approx(expected["actor_loss"], abs=0.01)
    assert first["entropy"] == pytest.approx(expected["entropy"], abs=0.02)
    assert first["kl_mean"] == pytest.approx(expected["kl_mean"], abs=0.02)
    assert first["value_mean"] == pytest.approx(expected["value_mean"], abs=0.1)
    error = expected["reward_std"] * math.sqrt(2 / BATCH)
    assert first["reward_mean"] == pytest.approx(expected["reward_mean"], abs=3 * error)
    assert 0 < max(line["logprob_gap"] for line in half.metrics) < LIMIT / 2
    assert max(line["logprob_gap"] for line in full.metrics) < 1e-4
    for weights, whole in ((half.actor, full.actor), (half.critic, full.critic)):
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        for name, matrix in weights.items():
            assert matrix.ndim == 1 or (matrix.float() - whole[name]).norm() < 0.05 * whole[name].norm()


LAYOUTS: dict[str, tuple[str, Layout, Layout, dict[str, Any]]] = {
    "pair, both overlaps": (
        "disaggregated", (1, 1, 1), (1, 1, 1),
        {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 4, "max": 4}},
    ),
    "replicas, sharded optimizer": ("colocated", (1, 1, 2), (1, 1, 2), {}),
    "trained in another layout": (
        "colocated", (2, 1, 1), (2, 1, 1),
        {"actor.train": {"tp": 1, "pp": 2}, "critic.train": {"tp": 1, "dp": 2, "recompute": "full"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [each if "both" in each else pytest.param(each, marks=pytest.mark.long) for each in LAYOUTS])
def test_every_layout_trains(workspace: Workspace, half: Outcome, name: str) -> None:
    """Equal to one process up to rounding, which tensor ranks' partial sums change, and with them draws."""
    mode, actor, scorer, changes = LAYOUTS[name]
    placement = {"mode": mode, "actor": parallel(actor), "scorer": parallel(scorer)}
    outcome = train(workspace, name.replace(" ", "-"), placement=placement, **HALF, **changes)
    assert all(line["logprob_gap"] < LIMIT for line in outcome.metrics)
    first, expected = outcome.metrics[0], half.metrics[0]
    assert first["actor_loss"] == pytest.approx(expected["actor_loss"], abs=0.01)
    assert first["entropy"] == pytest.approx(expected["entropy"], abs=0.02)
    if actor[0] == 1 and "overlap.inter" not in changes:
        assert len(same(outcome, half)) == BATCH
        assert first["critic_loss"] == pytest.approx(expected["critic_loss"], rel=0.01)
        assert first["kl_mean"] == pytest.approx(expected["kl_mean"], abs=0.01)
        assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def test_frozen_scorers_alone_in_bfloat16(workspace: Workspace, full: Outcome) -> None:
    trained = {"actor.dtype": "float32", "critic.dtype": "float32"}
    mode = {"placement.mode": "disaggregated", "overlap.intra": True}
    outcome = train(workspace, "mixed", reference={"init": SMALL}, **trained, **mode, **HALF)
    assert len(same(outcome, full)) == BATCH
    first, expected = outcome.metrics[0], full.metrics[0]
    assert first["logprob_gap"] < 1e-4 and 1e-5 < abs(first["kl_mean"]) < 0.05 and abs(expected["kl_mean"]) < 1e-3
    assert 0 < abs(first["reward_mean"] - expected["reward_mean"]) < 0.05
    assert first["value_mean"] == pytest.approx(expected["value_mean"], abs=1e-4)
    assert first["critic_loss"] == pytest.approx(expected["critic_loss"], rel=0.03)
    assert {tensor.dtype for tensor in (*outcome.actor.values(), *outcome.critic.values())} == {torch.float32}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kind", ["sft", pytest.param("rm", marks=pytest.mark.long)])
def test_supervised_stages_learn_as_in_float32(workspace: Workspace, tmp_path: Path, kind: str, ranks: int) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        run = tmp_path / dtype
        settings = {
            "run_dir": run, "batch_size": 8, "max_tokens": 120, "steps": 8, "epochs": 8, "parallel": {"dp": ranks},
            "tokenizer": {"path": workspace.root / "tokenizer.model"},
            "data": {"path": workspace.root / "data" / ("sft.jsonl" if kind == "sft" else "pairs.jsonl")},
            "model": {"init": SMALL}, "optimizer": {"lr": 1e-3},
            "runtime": {"device": "cpu", "micro_batch_tokens": 400, "dtype": dtype}, "logging": {"console": "off"},
        }  # fmt: skip
        run_ranks(ranks, "tests.e2e.supervised:train", kind=kind, settings=settings)
        losses[dtype] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(run / "weights" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    half, full = losses["bfloat16"], losses["float32"]
    assert half[0] == pytest.approx(full[0], rel=0.01) and half[-1] == pytest.approx(full[-1], abs=0.05 * full[0])
    assert half[-1] < 0.8 * half[0]


LORA = {"rank": 4, "alpha": 16.0}
ROLES = ("actor", "critic")


def configured(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    config = deep(workspace, name, **changes)
    for role in ROLES:
        config[role]["lora"] = LORA
    return config


def shared(config: dict[str, Any]) -> Outcome:
    assert any(run_ranks(world_size(run_of(config)), "tests.e2e.jobs:train_with_a_shared_reference", config=config))
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


@pytest.mark.parametrize("changes", [
    {"placement": {"mode": "disaggregated", "actor": {"pp": 2}, "reference": "actor"}},
    pytest.param(
        {"placement": {"mode": "colocated", "actor": {"tp": 2}}, "actor.train": {"tp": 1, "pp": 2, "dp": 1}},
        marks=pytest.mark.long),
], ids=["PP2 and reference | 1", "decodes TP2, trains PP2"])  # fmt: skip
def test_a_reference_with_the_actor_shares_its_weights(workspace: Workspace, plain: Outcome, changes: dict[str, Any]) -> None:
    assert_same(shared(configured(workspace, f"shared-{len(changes)}", **changes)), plain)


@pytest.mark.parametrize("mode", ["single", "disaggregated"])
def test_a_null_reference_begins_with_the_given_adapters(workspace: Workspace, plain: Outcome, weights: Path, mode: str) -> None:
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
    hidden, ffn, keys = DEEP["hidden_size"], DEEP["intermediate_size"], DEEP["hidden_size"] // 2
    sizes = [hidden + hidden, hidden + keys, hidden + keys, hidden + hidden] + [hidden + ffn] * 3  # inputs + outputs
    assert with_adapters["actor"].gradients == 4 * 4 * 4 * sum(sizes)
    broken = configured(workspace, "broken")
    broken["actor"]["lora"] = LORA | {"adapter": str(tmp_path)}
    assert any("adapter_config.json" in problem for problem in train_problems(TrainConfig(**broken)))


def test_roles_of_a_checkpoint_are_models_to_start_from(workspace: Workspace, tmp_path: Path) -> None:
    tied = SHAPE | {"tie_word_embeddings": True, "vocab_size": 283}  # which tensor ranks do not divide
    changes = {"actor.init": tied, "actor.train": {"tp": 1, "pp": 2}, "placement": {"mode": "colocated", "actor": {"tp": 2}}}
    first = workspace.config("first", steps=1, **changes, **{"checkpoint.every_steps": 1})
    outcome = run_ppo_ranks(first)
    assert outcome.actor["model.embed_tokens.weight"].shape == (283, 32), "no row more than the vocabulary has"
    models = workspace.root / "runs" / "first" / "checkpoints" / "step-000001" / "models"
    for role, target in (("actor", "causal-lm"), ("critic", "reward")):
        assert main(["convert", str(models / role), str(tmp_path / role), "--as", target]) == 0
        saved, found = tensors_of(workspace.root / "runs" / "first" / "weights" / role), tensors_of(tmp_path / role)
        assert saved.keys() == found.keys() and all(bool((saved[name] == found[name]).all()) for name in saved)
    with pytest.raises(CheckpointError, match="models of a run"):
        open_directory(models.parent)
    started = workspace.config("second", steps=1, **{"actor.optimizer.lr": 1e-30, "critic.optimizer.lr": 1e-30})
    started["actor"] = {"checkpoint": str(models / "actor"), "optimizer": {"lr": 1e-30}}
    started["critic"] = {"checkpoint": str(models / "critic"), "optimizer": {"lr": 1e-30}}
    again = run_ppo_ranks(started)
    for name, tensor in outcome.actor.items():
        assert bool((again.actor[name] == tensor).all()), name
