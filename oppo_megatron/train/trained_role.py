"""A trained role: the model that is updated, the model that decodes or scores, and the transfer of weights between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.model import DecodePath, Layers, TrainedRoleConfig
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.host_copies import on_device
from oppo_megatron.mcore.model import Head, RoleModel
from oppo_megatron.mcore.roles import load_role, load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.undo import Undo
from oppo_megatron.mcore.weights.weight_sync import MoveReport, Reallocation


@dataclass
class TrainedRole:
    """`serving` is the very module that is trained where layout and options allow; then nothing is moved."""

    trained: TrainedModel
    serving: RoleModel
    reallocation: Reallocation | None

    def retire(self) -> None:
        """An update begins; until `publish` the serving model computes by megatron-core's modules."""
        self.serving.begin_weight_update()

    def publish(self) -> MoveReport:
        """The updated weights reach the serving model.  Every rank of the role makes the call."""
        moved = MoveReport(0, 0.0) if self.reallocation is None else self.reallocation.move()
        self.serving.end_weight_update()
        return moved

    def undo(self) -> Callable[[], None]:
        """Set weights and optimizer aside; the call that puts them back, where they are updated and where they serve."""
        saved = Undo(self.trained)

        def back() -> None:
            saved.restore()
            self.publish()

        return back

    def share(self, stats: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        """Statistics of an update, known on the last training stage, on every rank of the role."""
        groups = self.trained.model.groups
        device = next(self.serving.parameters()).device
        values = on_device([stats.get(name, 0.0) for name in names], device, torch.float64)
        if groups.all.size() > 1:
            dist.broadcast(values, groups.output_rank, group=groups.all)
        return dict(zip(names, values.tolist(), strict=True))


def build_trained_role(
    config: TrainedRoleConfig,
    groups: RoleGroups,
    training: RoleGroups,
    *,
    head: Head,
    max_length: int,
    device: torch.device,
    path: DecodePath,
    layers: Layers,
    num_updates: int,
) -> TrainedRole:
    """Both models of a role on this rank.  `groups` is where it serves, `training` where it is updated."""
    layout = config.train
    plain = layout.vpp == 1 and not layout.sequence_parallel and layout.recompute == "none"
    multiple = lcm(groups.tp, training.tp)
    both: Any = {"head": head, "max_length": max_length, "device": device, "layers": layers, "vocab_multiple": multiple}
    if plain and training is groups:
        serving = load_role(config, groups, path=path, **both)
        return TrainedRole(TrainedModel(serving, config.optimizer, num_updates, layout), serving, None)
    serving = load_role(config, groups, path="module", **both)
    chunks = load_training(config, layout, training, **both)
    trained = TrainedModel(chunks, config.optimizer, num_updates, layout)
    role = TrainedRole(trained, serving.requires_grad_(False), Reallocation(chunks, serving))
    # Only now: what decoding computes with would keep the weights that give way to those that both models share, if they do.
    serving.decode_by(path)
    return role
