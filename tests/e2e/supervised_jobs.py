"""Supervised training on one of several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.run import RewardModelConfig, SFTConfig
from oppo_megatron.runtime.world import World
from oppo_megatron.train.reward_model import RewardModelling
from oppo_megatron.train.sft import FineTuning
from oppo_megatron.train.supervised import train_supervised


def train(kind: str, settings: dict[str, Any]) -> None:
    """As `run_sft` and `run_reward_model`, in the process group that the test's ranks already have."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if kind == "sft":
        train_supervised(SFTConfig(**settings), FineTuning(), world)
    else:
        train_supervised(RewardModelConfig(**settings), RewardModelling(), world)
