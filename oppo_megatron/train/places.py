"""The process groups of a run: of every role where it works and where it is trained, and the links of the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.links import Links, build_links
from oppo_megatron.layout.places import Place, role_places, training_places
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class Topology:
    """Where everything is, and this rank's groups (None where it has no part in a role).

    `training` holds the groups in which actor and critic are updated: the very same object where the layouts agree.
    """

    site: Site
    training_places: dict[str, Place]
    groups: dict[str, RoleGroups | None]
    training: dict[str, RoleGroups | None]
    links: Links


def build_topology(config: TrainConfig) -> Topology:
    """Create all process groups.  Every rank makes the call."""
    site, trained = Site(role_places(config)), training_places(config)
    groups = {name: build_groups(place.ranks, place.tp, place.pp, name) for name, place in site.places.items()}
    training = {
        name: groups[name]
        if place == site.places[name]
        else build_groups(place.ranks, place.tp, place.pp, f"{name}.train")
        for name, place in trained.items()
    }
    return Topology(site, trained, groups, training, build_links(site))
