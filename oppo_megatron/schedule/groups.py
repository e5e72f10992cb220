"""All process groups of a run, listed without making any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from oppo_megatron.layout.groups import ALONE, GroupName, group_name, model_groups
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.links import lanes_of
from oppo_megatron.schedule.rounds import Site


def run_groups(placements: Mapping[str, RolePlacement], trained: Mapping[str, RolePlacement]) -> list[GroupName]:
    """Those of each rank alone, of the roles' work, of their training, of the links and of checkpoints, in the order in which
    they are made.

    Without the world's own, which all ranks belong to.
    """
    site = Site(placements)
    world = tuple(range(1 + max(site.ranks)))
    found = dict.fromkeys(group_name(ALONE, (rank,)) for rank in world)
    for role, placement in [*placements.items(), *((r, p) for r, p in trained.items() if p != placements[r])]:
        found |= dict.fromkeys(name for _, name in model_groups(placement.ranks, placement.tp, placement.pp, role))
    lanes = [GroupName(lane.label, lane.ranks) for lane in lanes_of(site)]
    return [*found, *lanes, GroupName("checkpoints", world)]


def groups_by_rank(groups: Iterable[GroupName]) -> Counter[int]:
    """How many groups each rank belongs to, the world's own among them."""
    counts = Counter(rank for group in groups for rank in group.ranks)
    return Counter({rank: 1 + count for rank, count in counts.items()})


def most_streams(site: Site) -> int:
    """The most CUDA streams that a rank has work on in a round: one for each role, for each link, and for each other group."""
    counts = Counter(rank for placement in site.placements.values() for rank in placement.ranks)
    lanes = list(lanes_of(site))
    counts.update(rank for lane in lanes for link in lane.links for rank in link[:2])
    names = {GroupName(lane.label, lane.ranks) for lane in lanes}
    groups = [group for group in run_groups(site.placements, {}) if len(group.ranks) > 1 and group not in names]
    return (counts + groups_by_rank(groups)).most_common(1)[0][1]


def calls_of(groups: Iterable[GroupName]) -> int:
    """How often each rank calls `new_group`: for all groups of several ranks, also of others, and once for itself."""
    return 1 + sum(group.label != ALONE for group in groups)
