"""The process groups of a run: of every role for its work and its training, and of the links of the schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oppo_megatron.cluster.process_groups import SharedGroups, use_once, use_ring_once
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.links import Links, build_links
from oppo_megatron.layout.placements import RolePlacement, role_placements, training_placements
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class Topology:
    """Where everything is, and this rank's groups (None where it has no part in a role).

    `training` holds the groups in which actor and critic are updated: the very same object where the layouts agree.
    """

    site: Site
    training_placements: dict[str, RolePlacement]
    groups: dict[str, RoleGroups | None]
    training: dict[str, RoleGroups | None]
    links: Links


def build_topology(config: TrainConfig, device: torch.device) -> Topology:
    """Create all process groups (`schedule/links.py` lists them) and use each once, the links as links.

    The world's own, too, which carries scores and statistics.  Every rank makes the call.
    """
    site, trained, shared = Site(role_placements(config)), training_placements(config), SharedGroups()
    groups = {
        name: build_groups(placement.ranks, placement.tp, placement.pp, name, shared)
        for name, placement in site.placements.items()
    }
    training = {
        name: groups[name]
        if placement == site.placements[name]
        else build_groups(placement.ranks, placement.tp, placement.pp, name, shared)
        for name, placement in trained.items()
    }
    links = build_links(site)
    own = dict.fromkeys(group for role in (*groups.values(), *training.values()) if role for group in role.made)
    use_once([None, *own], device)
    links.use_once(device)
    for name, role in training.items():
        if role is not None and config.trained[name].train.vpp > 1:
            use_ring_once(role.collection.pp, device)
    return Topology(site, trained, groups, training, links)
