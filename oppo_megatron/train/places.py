"""Where each role lives, known to every rank, and the process groups that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.runtime.mcore.groups import RoleGroups, build_groups
from oppo_megatron.runtime.stream import StreamGroups, build_stream_groups


@dataclass(frozen=True)
class Place:
    """The ranks of a role and its layout over them."""

    ranks: tuple[int, ...]
    parallel: ParallelConfig

    @property
    def output_rank(self) -> int:
        """The rank that has the role's outputs: first of the last pipeline stage."""
        return self.ranks[(self.parallel.pp - 1) * self.parallel.tp]


def role_places(config: TrainConfig) -> dict[str, Place]:
    """Actor first, then the scorers; a reward model only where one is configured."""
    placement = config.placement
    actor, scorers = tuple(placement.actor_ranks), tuple(placement.scorer_ranks)
    reference = config.reference.parallel if config.reference else None
    places = {
        "actor": Place(actor, config.actor.parallel or placement.actor),
        "reference": Place(scorers, reference or placement.scorer),
        "critic": Place(scorers, config.critic.parallel or placement.scorer),
    }
    if config.reward is not None:
        places["reward"] = Place(scorers, config.reward.parallel or placement.scorer)
    return places


@dataclass(frozen=True)
class Topology:
    """This rank's groups of every role (None where it has no part in the role) and of the token stream."""

    places: dict[str, Place]
    groups: dict[str, RoleGroups | None]
    stream: StreamGroups

    def held(self) -> Iterator[tuple[str, RoleGroups]]:
        """The roles that this rank has a part in."""
        return ((name, groups) for name, groups in self.groups.items() if groups is not None)


def build_topology(config: TrainConfig) -> Topology:
    """Create all process groups.  Every rank makes the call."""
    places = role_places(config)
    groups = {
        name: build_groups(place.ranks, place.parallel.tp, place.parallel.pp, name) for name, place in places.items()
    }
    stream = build_stream_groups(places["actor"].output_rank, list(places["critic"].ranks))
    return Topology(places, groups, stream)
