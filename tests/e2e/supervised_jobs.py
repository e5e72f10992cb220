"""Supervised training on one of several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.world import World
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.model import LearningModelConfig
from oppo_megatron.train.reference_pass import reference_fingerprint
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.supervised import task_of, train_supervised
from tests.support.configs import run_of

COMMANDS = {"prm": "rm", "kto": "dpo"}
"""The commands of kinds that a setting selects."""


def train(kind: str, settings: dict[str, Any], stop_after: int | None = None) -> None:
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    preemption = Preemption()
    if stop_after is not None:
        preemption = StopAfter(stop_after)
    config = run_of(settings, SUPERVISED[COMMANDS.get(kind, kind)])
    train_supervised(config, task_of(config), world, preemption)


def fingerprints(models: list[dict[str, Any]]) -> list[str]:
    return [reference_fingerprint(LearningModelConfig.model_validate(model)) for model in models]


class StopAfter(Preemption):
    def __init__(self, step: int):
        super().__init__()
        self.left = step

    def agreed_with(self, mine: bool, activity: Activity | None = None) -> tuple[bool, bool]:
        self.left -= 1
        if not self.left and dist.get_rank() == dist.get_world_size() - 1:
            self.ask()
        return super().agreed_with(mine, activity)
