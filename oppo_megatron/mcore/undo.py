"""Undoes updates: keeps weights, optimizer state and learning rate of a trained model in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.mcore.training import TrainedModel


class Undo:
    """A copy of `model`'s state; `restore` restores it to the bit after any updates.

    Takes as much host memory as weights and optimizer on this rank.
    """

    def __init__(self, model: TrainedModel):
        self._scheduler, self._num_steps = model.scheduler, model.scheduler.num_steps
        inner = [each.optimizer for each in model.optimizer.chained_optimizers if each.optimizer is not None]
        # The optimizer may hold weights of its own: float32 copies, or a replica's shares.
        held = [p for each in inner for group in each.param_groups for p in group["params"]]
        params = {id(p): p for p in (*(p for c in model.chunks for p in c.parameters() if p.requires_grad), *held)}
        self._weights = [(p.data, _aside(p.data)) for p in params.values()]
        self._groups = [(group, _settings(group)) for each in inner for group in each.param_groups]
        self._states = [(each.state, {p: _set_aside(state) for p, state in each.state.items()}) for each in inner]

    @torch.no_grad()
    def restore(self) -> None:
        for weight, before in self._weights:
            weight.copy_(before)
        for group, settings in self._groups:
            group.update(settings)
        for states, saved in self._states:
            for param in [p for p in states if p not in saved]:  # made by an update since
                del states[param]
            for param, entries in saved.items():
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        states[param][name].copy_(value)
                    else:
                        states[param][name] = value
        self._scheduler.num_steps = self._num_steps


def _aside(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _set_aside(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _aside(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
