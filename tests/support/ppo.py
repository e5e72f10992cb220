"""Tiny PPO runs on real ranks, what they left behind, and what makes two of them the same."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oppo_megatron.data.generated import DatasetSizes, write_dataset
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.layout.placements import world_size
from tests.support.configs import run_of
from tests.support.ranks import run_ranks

SHAPE = {
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 288, "max_position_embeddings": 256, "initializer_range": 0.4,
}  # fmt: skip
"""A wide initialisation makes the policy's distribution far from uniform, and responses end at different lengths."""


@dataclass
class Workspace:
    root: Path

    @classmethod
    def create(cls, root: Path) -> Workspace:
        files = write_dataset(root / "data", 1, DatasetSizes(sft=200, pairs=8, prompts=64, heldout=16))
        rows = [json.loads(line) for line in files["sft"].read_text().splitlines()]
        train_sentencepiece((r["prompt"] + r["completion"] for r in rows), root / "tokenizer.model", 280)
        return cls(root)

    def files(self, name: str, data: str, **reading: Any) -> dict[str, Any]:
        return {
            "run_dir": str(self.root / "runs" / name), "tokenizer": {"path": str(self.root / "tokenizer.model")},
            "data": {"path": str(self.root / "data" / f"{data}.jsonl"), **reading},
        }  # fmt: skip

    def config(self, name: str, **changes: Any) -> dict[str, Any]:
        """The plain configuration with sections or dotted settings replaced: config("x", **{"rollout.top_k": 5})."""
        config: dict[str, Any] = {
            **self.files(name, "prompts", max_prompt_tokens=96), "seed": 11, "steps": 3, "placement": {"mode": "single"},
            "actor": {"init": SHAPE, "optimizer": {"lr": 2e-3}}, "critic": {"init": SHAPE, "optimizer": {"lr": 2e-3}},
            "reward": {"init": SHAPE}, "rewards": [{"kind": "model"}, {"kind": "verifier", "name": "arithmetic", "weight": 0.5}],
            "rollout": {"batch_size": 6, "max_response_tokens": 40},
            "ppo": {"epochs": 2, "minibatches": 2, "kl": {"coefficient": 0.05}, "entropy_coefficient": 0.01},
            "overlap": {"intra": False, "inter": False, "chunk": 7}, "logging": {"console": "off", "rollouts": True},
        }  # fmt: skip
        config = deepcopy(config)
        for key, value in changes.items():
            node = config
            *path, last = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = deepcopy(value)
        return config


@dataclass
class Outcome:
    """A finished run: trained rollouts in order, metrics, final weights by role; `greedy`: rollouts that were a baseline only."""

    rollouts: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    actor: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]
    greedy: list[dict[str, Any]] = field(default_factory=list)

    def tokens(self) -> dict[int, list[int]]:
        return {row["seq_id"]: row["tokens"] for row in [*self.rollouts, *self.greedy]}

    def batches(self) -> list[list[int]]:
        steps = sorted({row["step"] for row in self.rollouts})
        return [[row["seq_id"] for row in self.rollouts if row["step"] == step] for step in steps]


def run_ppo_ranks(config: dict[str, Any]) -> Outcome:
    world = world_size(run_of(config))
    run_ranks(world, "tests.e2e.jobs:train", config=config)
    return read_outcome(Path(config["run_dir"]))


def read_outcome(run: Path) -> Outcome:
    def lines(name: str) -> list[dict[str, Any]]:
        with (run / name).open(encoding="utf-8") as file:  # a response may hold U+2028, which ends no line
            return [json.loads(line) for line in file]

    # Where a role has an adapter, the adapter's alone.
    weights = {path.parent.name: load_file(path) for path in run.glob("weights/*/*model.safetensors")}
    greedy, trained = [], []
    for row in lines("rollouts.jsonl"):
        (greedy if row.get("greedy") else trained).append(row)
    return Outcome(trained, lines("metrics.jsonl"), weights["actor"], weights.get("critic", {}), greedy)


def weight_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((float((a[name] - b[name]).abs().max()) for name in a), default=0.0)


WITHOUT_CRITIC: dict[str, Any] = {"algorithm": {"preset": "reinforce_pp"}, "critic": None}
TOLERANCE = 2e-4
SEED = 23
DEEP = SHAPE | {"num_hidden_layers": 4}
STEADY_ADAM = {"lr": 2e-3, "eps": 1e-4}
Layout = tuple[int, int, int]


def deep(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    """The plain configuration, with a SEED whose draws are at least 2e-3 of probability away from a border between two tokens."""
    roles: dict[str, Any] = {
        "actor": {"init": DEEP, "optimizer": STEADY_ADAM}, "critic": {"init": DEEP, "optimizer": STEADY_ADAM},
        "reward": {"init": DEEP},
    }  # fmt: skip
    return workspace.config(name, **(roles | {"seed": SEED, "rollout.top_k": 6} | changes))


def parallel(layout: Layout) -> dict[str, int]:
    return dict(zip(("tp", "pp", "dp"), layout, strict=True))


def assert_same(outcome: Outcome, plain: Outcome) -> None:
    """The same tokens and batches, and weights within TOLERANCE (absolute; they move by about 1e-2)."""
    assert outcome.tokens() == plain.tokens() and outcome.batches() == plain.batches()
    assert weight_distance(outcome.actor, plain.actor) < TOLERANCE
    assert weight_distance(outcome.critic, plain.critic) < TOLERANCE
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4
    for ours, theirs in zip(outcome.metrics, plain.metrics, strict=True):
        assert ours["actor_loss"] == pytest.approx(theirs["actor_loss"], abs=1e-4)
        assert ("critic_loss" in ours) == ("critic_loss" in theirs) == bool(plain.critic)
        if plain.critic:
            assert ours["critic_loss"] == pytest.approx(theirs["critic_loss"], rel=1e-3)
