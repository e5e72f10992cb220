"""A reward model on this process alone, to be asked by a service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.config.model import ParallelConfig, RoleConfig, RuntimeConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.modeldir.headers import read_hf_config


@contextmanager
def open_reward_model(
    reward: RoleConfig, runtime: RuntimeConfig, *, max_tokens: int, vocab_size: int | None = None
) -> Iterator[tuple[RoleModel, torch.device]]:
    """The model, and the device that it is on.  `vocab_size`: that of the tokenizer that texts are read with, if one is.

    Raises ConfigError or CheckpointError.
    """
    choose_device(runtime)
    shape = read_hf_config(reward)
    if problems := check_shape("reward", shape, ParallelConfig(), max_tokens, vocab_size or shape["vocab_size"]):
        raise ConfigError(problems)
    with open_world(runtime, {}) as world:
        groups = build_groups(range(1), 1, 1, "reward")
        assert groups is not None
        model = load_role(reward, groups, head="scalar", max_length=max_tokens, device=world.device)
        model.requires_grad_(False)
        yield model, world.device
