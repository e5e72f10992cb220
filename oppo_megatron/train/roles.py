"""Process groups of a run, and its trained roles: the updated model and the one that decodes or scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import SharedGroups, use_once, use_ring_once
from oppo_megatron.config.model import TrainedRoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.executor import Links, build_links
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import RolePlacement, role_placements, training_placements
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role, load_training
from oppo_megatron.mcore.training import TrainedModel, Undo
from oppo_megatron.mcore.weights.weight_sync import MoveReport, Reallocation
from oppo_megatron.schedule.rounds import Site


@dataclass
class TrainedRole:
    """`serving` is the trained module itself if layout and options allow it; then no weights are moved."""

    trained: TrainedModel
    serving: RoleModel
    reallocation: Reallocation | None

    def retire(self) -> None:
        """Begin an update; until `publish`, serving uses megatron-core's modules."""
        self.serving.begin_weight_update()

    def publish(self) -> MoveReport:
        """Move the new weights to `serving`.  Collective of the role."""
        moved = MoveReport(0, 0.0) if self.reallocation is None else self.reallocation.move()
        self.serving.end_weight_update()
        return moved

    def undo(self) -> Callable[[], None]:
        saved = Undo(self.trained)

        def back() -> None:
            saved.restore()
            self.publish()

        return back

    def share(self, stats: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        """Share statistics of the last stage with every rank of the role."""
        groups = self.trained.model.groups
        device = next(self.serving.parameters()).device
        values = on_device([stats.get(name, 0.0) for name in names], device, torch.float64)
        if groups.all.size() > 1:
            dist.broadcast(values, groups.output_rank, group=groups.all)
        return dict(zip(names, values.tolist(), strict=True))


def build_trained_role(
    config: TrainedRoleConfig, groups: RoleGroups, training: RoleGroups, *, head: Head, role: str, max_length: int,
    device: torch.device, num_updates: int,
) -> TrainedRole:  # fmt: skip
    layout = config.train
    plain = layout.vpp == 1 and not layout.sequence_parallel and layout.recompute == "none"
    multiple = lcm(groups.tp, training.tp)
    both: Any = {"head": head, "role": role, "max_length": max_length, "device": device, "vocab_multiple": multiple}
    if plain and training is groups:
        serving = load_role(config, groups, **both)
        return TrainedRole(TrainedModel(serving, config.optimizer, num_updates, layout), serving, None)
    serving = load_role(config, groups, path="module", **both)
    chunks = load_training(config, layout, training, **both)
    trained = TrainedModel(chunks, config.optimizer, num_updates, layout)
    built = TrainedRole(trained, serving.requires_grad_(False), Reallocation(chunks, serving))
    # Only now: otherwise decoding would keep the weights that a shared model replaces.
    serving.decode_by("packed")
    return built


@dataclass(frozen=True)
class Topology:
    """Placement of all roles, and this rank's groups; `training` updates actor and critic."""

    site: Site
    training_placements: dict[str, RolePlacement]
    groups: dict[str, RoleGroups | None]
    training: dict[str, RoleGroups | None]
    links: Links


def build_topology(config: TrainConfig, device: torch.device) -> Topology:
    """Create all process groups and links (`schedule/links.py`), and use each once."""
    site, trained, shared = Site(role_placements(config)), training_placements(config), SharedGroups()
    groups = {name: build_groups(p.ranks, p.tp, p.pp, name, shared) for name, p in site.placements.items()}
    training = {
        name: groups[name] if p == site.placements[name] else build_groups(p.ranks, p.tp, p.pp, name, shared)
        for name, p in trained.items()
    }
    links = build_links(site)
    own = dict.fromkeys(group for role in (*groups.values(), *training.values()) if role for group in role.made)
    use_once([None, *own], device)
    links.use_once(device)
    for name, role in training.items():
        if role is not None and config.trained[name].train.vpp > 1:
            use_ring_once(role.collection.pp, device)
    return Topology(site, trained, groups, training, links)
