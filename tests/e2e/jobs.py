"""Jobs that run on the ranks of the pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.runtime.world import World
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.setup import read_inputs


def train(config: dict[str, Any]) -> None:
    """One rank of a whole PPO run, as `oppo train` starts it."""
    checked = TrainConfig(**config)
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    run_ppo(checked, world, read_inputs(checked))
