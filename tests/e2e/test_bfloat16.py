"""Whole runs in bfloat16: near float32's, in every layout, with some roles only, and trained from supervised stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oppo_megatron.config.reliability import GuardsConfig
from tests.support.layouts import DEEP, Layout, parallel
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks
from tests.support.ranks import run_ranks

HALF = {"runtime.dtype": "bfloat16"}
SHAPE = DEEP | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.15}
BATCH = 24


def train(workspace: Workspace, name: str, **changes: Any) -> Outcome:
    """Two steps with few candidates a draw and short responses, so that many are drawn alike in both types."""
    roles = {"actor.init": SHAPE, "critic.init": SHAPE, "reward.init": SHAPE}
    sizes = {"rollout.batch_size": BATCH, "rollout.max_response_tokens": 10, "rollout.top_k": 3, "steps": 2}
    rates = {"actor.optimizer": {"lr": 2e-4}, "critic.optimizer": {"lr": 1e-3}}
    return run_ppo_ranks(workspace.config(name, **roles, **sizes, **rates, **changes))


@pytest.fixture(scope="module")
def full(workspace: Workspace) -> Outcome:
    return train(workspace, "full")


@pytest.fixture(scope="module")
def half(workspace: Workspace) -> Outcome:
    return train(workspace, "half", **HALF)


def limit() -> float:
    found = GuardsConfig().gap_limit("bfloat16", 1.0)
    assert found is not None
    return found


def same(one: Outcome, other: Outcome) -> list[int]:
    return [i for i in one.batches()[0] if one.tokens()[i] == other.tokens()[i]]


def test_the_first_step_is_near_float32s(full: Outcome, half: Outcome) -> None:
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


def test_the_gap_of_the_log_probs_is_logged_and_small(full: Outcome, half: Outcome) -> None:
    gaps = [line["logprob_gap"] for line in half.metrics]
    assert 1e-3 < max(gaps) < limit() / 2
    assert max(line["logprob_gap"] for line in full.metrics) < 1e-4


def test_the_weights_are_left_in_bfloat16(half: Outcome, full: Outcome) -> None:
    for weights, expected in ((half.actor, full.actor), (half.critic, full.critic)):
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        for name, matrix in weights.items():
            assert matrix.ndim == 1 or (matrix.float() - expected[name]).norm() < 0.05 * expected[name].norm()


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains(workspace: Workspace, half: Outcome, name: str) -> None:
    """Equal to one process up to rounding, which tensor ranks' partial sums change, and with them draws."""
    mode, actor, scorer, changes = LAYOUTS[name]
    placement = {"mode": mode, "actor": parallel(actor), "scorer": parallel(scorer)}
    outcome = train(workspace, name.replace(" ", "-"), placement=placement, **HALF, **changes)
    assert all(line["logprob_gap"] < limit() for line in outcome.metrics)
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
    outcome = train(workspace, "mixed", reference={"init": SHAPE}, **trained, **mode, **HALF)
    assert len(same(outcome, full)) == BATCH
    first, expected = outcome.metrics[0], full.metrics[0]
    assert first["logprob_gap"] < 1e-4
    assert 1e-5 < abs(first["kl_mean"]) < 0.05 and abs(expected["kl_mean"]) < 1e-3
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
            "run_dir": run,
            "batch_size": 8,
            "max_tokens": 120,
            "steps": 8,
            "epochs": 8,
            "parallel": {"dp": ranks},
            "tokenizer": {"path": workspace.root / "tokenizer.model"},
            "data": {"path": workspace.root / "data" / ("sft.jsonl" if kind == "sft" else "pairs.jsonl")},
            "model": {"init": SHAPE},
            "optimizer": {"lr": 1e-3},
            "runtime": {"device": "cpu", "micro_batch_tokens": 400, "dtype": dtype},
            "logging": {"console": "off"},
        }
        run_ranks(ranks, "tests.e2e.supervised_jobs:train", kind=kind, settings=settings)
        losses[dtype] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(run / "weights" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    half, full = losses["bfloat16"], losses["float32"]
    assert half[0] == pytest.approx(full[0], rel=0.01) and half[-1] == pytest.approx(full[-1], abs=0.05 * full[0])
    assert half[-1] < 0.8 * half[0]
