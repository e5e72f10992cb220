"""All members of a group know it by one name, as torch gives it; over its fake back end, which names groups as others do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the back end)

from oppo_megatron.cluster import process_groups
from oppo_megatron.cluster.process_groups import SharedGroups, new_group, ring_pairs
from oppo_megatron.engine.executor import build_links
from oppo_megatron.layout.placements import ALONE, RolePlacement
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.schedule.links import run_groups
from oppo_megatron.schedule.rounds import Site
from tests.support.schedules import colocated, disaggregated, make_site, split_scorers, turns


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "world_timeout", lambda: timedelta(seconds=60))


@contextmanager
def seen_from(rank: int, size: int) -> Iterator[dist.Store]:
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield store
    finally:
        dist.destroy_process_group()


SITES = {
    "colocated": colocated((2, 2, 2)),
    "apart": disaggregated((1, 4, 1), (2, 1, 2)),
    "many listeners": disaggregated((1, 2, 1), (1, 1, 20)),
    "split scorers": split_scorers((1, 2, 2)),
    "overlapping": make_site((2, 2, 2), {"critic": (0, 4, 1, 1), "reward": (6, 1, 2, 2)}),
    "a rank without a role": Site({"actor": RolePlacement((0, 1), pp=2), "critic": RolePlacement((3, 4), pp=2)}),
}


@pytest.mark.parametrize("name", SITES)
def test_members_of_a_group_call_it_by_one_name(name: str) -> None:
    site = SITES[name]
    size, names = 1 + max(site.ranks), defaultdict[tuple[int, ...], list[set[str]]](list)
    for viewer in range(size):
        own = defaultdict[tuple[int, ...], set[str]](set)
        with seen_from(viewer, size):
            for group in groups_of(site):
                own[tuple(dist.get_process_group_ranks(group))].add(group.group_name)
        for ranks, found in own.items():
            names[ranks].append(found)
    listed = {tuple(sorted(group.ranks)) for group in run_groups(site.placements, {}) if group.label != ALONE}
    assert {ranks for ranks in names if len(ranks) > 1} == listed
    for ranks, found in names.items():
        assert len(found) == len(ranks) and all(each == found[0] for each in found), ranks


def groups_of(site: Site) -> list[dist.ProcessGroup]:
    shared = SharedGroups()
    roles = [build_groups(p.ranks, p.tp, p.pp, role, shared) for role, p in site.placements.items()]
    links = build_links(site)
    own = [group for role in roles if role is not None for group in role.made]
    return [*own, *links.groups.values(), new_group(range(1 + max(site.ranks)), "checkpoints")]


def test_members_alone_would_call_it_by_several() -> None:
    """Shows why all ranks call for all groups.  If this fails, torch has changed, and each rank might call for its own alone."""
    names = set()
    for rank in (0, 1):
        with seen_from(rank, 3):
            if rank == 0:
                dist.new_group([0, 2], use_local_synchronization=True)
            names.add(dist.new_group([0, 1], use_local_synchronization=True).group_name)
    assert len(names) == 2


def test_a_call_for_others_makes_and_sends_nothing() -> None:
    with seen_from(4095, 4096) as store:
        before = store.num_keys()
        for first in range(0, 4088, 8):
            assert new_group(range(first, first + 8), "others") is dist.GroupMember.NON_GROUP_MEMBER
        assert store.num_keys() == before
        store.set("one", "more")
        assert store.num_keys() == before + 1


@pytest.mark.parametrize("size", range(2, 10))
def test_neighbours_in_a_ring_meet_without_a_circle_of_waiting(size: int) -> None:
    ranks = [10 * number for number in range(size)]
    pairs = ring_pairs(ranks)
    assert {frozenset(pair) for pair in pairs} == {frozenset((rank, (rank + 10) % (10 * size))) for rank in ranks}
    lists = {rank: [pair for pair in pairs if rank in pair] for rank in ranks}
    assert len(pairs) == (size if size > 2 else 1)
    assert turns(lists, lambda pair: pair) == (1 if size == 2 else 2 + size % 2)
