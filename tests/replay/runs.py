"""Short runs whose weights leave a replay no room: every parameter random, Adam's divisor well above rounding."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.replay.loop import Replay, Replayed
from tests.support.hf import save_tiny
from tests.support.ppo import SHAPE, STEADY_ADAM, Outcome, Workspace, read_outcome, weight_distance

CLOSE = 2e-5
"""Largest absolute distance of a weight; they move by about 1e-2."""
EDGE = 3e-6
"""Rounding decides if a ratio so close to the edge of its range has a gradient: if weights differ, the range is moved by it."""


def save_models(root: Path) -> None:
    shape = {name: SHAPE[name] for name in SHAPE if name not in ("model_type", "initializer_range")}
    save_tiny(root / "actor", "qwen2", **shape)
    save_tiny(root / "critic", "qwen2", "scalar", seed=5, **shape)
    save_tiny(root / "reward", "qwen2", "scalar", seed=6, **shape)
    save_tiny(root / "reference", "qwen2", seed=7, **shape)
    save_tiny(root / "experts", "qwen3_moe", **shape)
    save_tiny(root / "experts-critic", "mixtral", "scalar", seed=5, **shape)


def carrying(workspace: Workspace, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    root = workspace.root
    settings: dict[str, Any] = {
        "steps": 4, "ppo.gamma": 0.97, "reward": {"checkpoint": str(root / "reward")},
        **{role: {"checkpoint": str(root / role), "optimizer": STEADY_ADAM} for role in ("actor", "critic")},
        "rollout": {"batch_size": 6, "max_response_tokens": 40, "stop": list(range(240, 256))},
        "overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3},
    }  # fmt: skip
    config = workspace.config(name, **(settings | dict(changes)))
    for role in ("actor", "critic", "reference"):
        if config.get(role):
            config[role]["checkpoint"] = str(root / config[role]["checkpoint"])
    return config


def final_weights(directory: Path, kind: Any) -> dict[str, torch.Tensor]:
    """By transformers' names; those in a file differ for experts."""
    return dict(kind.from_pretrained(directory, dtype=torch.float32).state_dict())


def assert_replays(config: Mapping[str, Any], versions: bool = False, **choices: Any) -> tuple[Outcome, Replayed]:
    run = Path(config["run_dir"])
    outcome = read_outcome(run)
    outcome.actor = final_weights(run / "weights/actor", AutoModelForCausalLM)
    if outcome.critic:
        outcome.critic = final_weights(run / "weights/critic", AutoModelForSequenceClassification)
    assert all(line["skipped"] is None for line in outcome.metrics), "a step that was taken back cannot be replayed"
    for edge in 0.0, EDGE, -EDGE:
        replay = Replay(run, versions, **choices)
        low, high = replay.recipe.clip_low + edge, replay.recipe.clip_high + edge
        replay.recipe = replace(replay.recipe, clip_low=low, clip_high=high)
        replayed = replay.run()
        if weight_distance(outcome.actor, {name: replayed.actor[name] for name in outcome.actor}) < CLOSE:
            break
    trained = [line for line in outcome.metrics if "lr" in line]
    assert [line["lr"] for line in trained] == pytest.approx([rate for rate in replayed.rates if not math.isnan(rate)])
    coefficients = [line["kl_coefficient"] for line in outcome.metrics]
    if replay.recipe.kl in ("none", "margin"):
        assert coefficients == [None] * len(coefficients)
    else:
        # log-probs in float32 differ by about 1e-6 between kernels, and the coefficient follows their sum over a response
        assert coefficients == pytest.approx(replayed.coefficients, rel=1e-5)
    start = AutoModelForCausalLM.from_pretrained(config["actor"]["checkpoint"], dtype=torch.float32).state_dict()
    assert weight_distance(outcome.actor, {name: start[name] for name in outcome.actor}) > 1e-3, "the run should train"
    for role, ours, theirs in ("actor", outcome.actor, replayed.actor), ("critic", outcome.critic, replayed.critic):
        assert weight_distance(ours, {name: theirs[name] for name in ours}) < CLOSE, role
    return outcome, replayed
