"""Which ranks form which group, for layouts of up to eight ranks, against megatron-core's own rank generator."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator

from oppo_megatron.cluster import process_groups
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from tests.support.schedules import turns

LAYOUTS = [(tp, pp, dp) for tp, pp, dp in product((1, 2, 4, 8), repeat=3) if tp * pp * dp <= 8]
OFFSET = 3  # the role need not begin at rank 0


@dataclass(eq=False)
class FakeGroup:
    ranks: list[int]
    viewer: int
    desc: str

    def rank(self) -> int:
        return self.ranks.index(self.viewer)

    def size(self) -> int:
        return len(self.ranks)


def views(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int) -> tuple[list[int], dict[int, RoleGroups], Any]:
    ranks = list(range(OFFSET, OFFSET + tp * pp * dp))
    calls: dict[int, list[tuple[int, ...]]] = {}
    found: dict[int, Any] = {}
    for viewer in range(OFFSET + len(ranks) + 1):
        calls[viewer] = []

        def new_group(members: tuple[int, ...], desc: str, viewer: int = viewer) -> FakeGroup:
            assert len(members) > 1 or members == (viewer,), "a group of one is made by its rank alone"
            calls[viewer] += [members] if len(members) > 1 else []
            return FakeGroup(list(members), viewer, desc)

        monkeypatch.setattr(process_groups, "new_group", new_group)
        monkeypatch.setattr(dist, "get_rank", lambda viewer=viewer: viewer)
        found[viewer] = build_groups(ranks, tp, pp, "role")
    return ranks, found, calls


@pytest.mark.parametrize("tp,pp,dp", LAYOUTS)
def test_groups_used_once_in_the_order_of_making_wait_in_no_circle(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int
) -> None:
    _, found, calls = views(monkeypatch, tp, pp, dp)
    lists = {
        viewer: [(group.desc, tuple(group.ranks)) for group in groups.made if group.size() > 1]
        for viewer, groups in found.items()
        if groups
    }
    assert sum(len({*own}) for own in lists.values()) == sum(map(len, calls[0])), "each group, by each of its members"
    assert turns(lists, lambda group: group[1]) == len({desc for own in lists.values() for desc, _ in own})
    if tp > 1:
        lists[OFFSET] = lists[OFFSET][::-1]
        assert turns(lists, lambda group: group[1]) is None


@pytest.mark.parametrize("tp,pp,dp", LAYOUTS)
def test_groups_are_megatrons_and_each_rank_knows_its_place(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int) -> None:
    ranks, found, calls = views(monkeypatch, tp, pp, dp)
    assert len(set(map(tuple, calls.values()))) == 1, (
        "every rank of the world creates the same groups of several in the same order"
    )
    assert [viewer for viewer, groups in found.items() if groups is None] == [v for v in found if v not in ranks]
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-dp-pp", rank_offset=OFFSET)
    kinds = {"tp": "tp", "pp": "pp", "dp": "dp", "mp": "tp-pp", "tp_dp_cp": "tp-dp", "dp_cp": "dp", "tp_ep_pp": "tp-pp"}
    for field, token in kinds.items():
        expected = {tuple(members) for members in generator.get_ranks(token)}
        seen = {tuple(sorted(getattr(found[rank].collection, field).ranks)) for rank in ranks}
        assert seen == expected, field
    for rank in ranks:
        groups, place = found[rank], rank - OFFSET
        assert (groups.tp, groups.pp, groups.dp) == (tp, pp, dp)
        assert groups.tp_rank == place % tp and groups.pp_rank == place // (tp * dp)
        assert groups.dp_rank == place // tp % dp
        assert groups.is_last_stage == (groups.pp_rank == pp - 1)
        assert groups.all.ranks == ranks == list(groups.ranks)
        assert groups.output_rank == OFFSET + (pp - 1) * tp * dp
        collection = groups.collection
        stages = collection.pp.ranks  # of this rank's pipeline, in their order
        assert stages == [OFFSET + p * tp * dp + place % (tp * dp) for p in range(pp)]
        assert collection.cp.ranks == collection.ep.ranks == [rank]
        ends = {stages[0], stages[-1]}
        assert collection.embd is None if rank not in ends else set(collection.embd.ranks) == ends


def test_sizes_that_do_not_fill_the_ranks_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        build_groups(range(3), 2, 1, "role")
