"""Groups of a run are few for each rank; links are those that rounds use, and first use ends; chunks reach all listeners."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dry_run import MODEL_70B
from oppo_megatron.cluster import process_groups
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine import executor as links_module
from oppo_megatron.layout.placements import ALONE, GroupName, RolePlacement, role_placements, training_placements, world_size
from oppo_megatron.schedule.actions import Op, Payload
from oppo_megatron.schedule.links import Link, calls_of, groups_by_rank, in_waves, lanes_of, link_of, run_groups
from oppo_megatron.schedule.rounds import FAN_OUT, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import intra
from oppo_megatron.train import roles
from oppo_megatron.train.roles import Topology, build_topology
from tests.support.configs import least_config
from tests.support.schedules import colocated, disaggregated, links_of, make_round, make_site, turns
from tests.unit.test_schedule_components import sites

ROLES = ("actor", "reference", "critic", "reward")
SHAPES = [(1, 1), (8, 1), (1, 8), (2, 4), (8, 8), (4, 16), (8, 32)]


def over(first: int, size: int, tp: int, pp: int) -> RolePlacement:
    return RolePlacement(tuple(range(first, first + size)), tp, pp, size // (tp * pp))


CASES = [(n, *shape) for n in [8, 64, 1024] for shape in SHAPES if n >= 2 * math.prod(shape)] + [(16384, 8, 8)]


@pytest.mark.parametrize(("size", "tp", "pp"), CASES)
def test_a_rank_belongs_to_few_groups_whatever_the_size(size: int, tp: int, pp: int) -> None:
    actor, scorer = over(0, size // 2, tp, pp), over(size // 2, size // 2, tp, pp)
    apart = {"actor": actor, **dict.fromkeys(ROLES[1:], scorer)}
    for placements in (apart, dict.fromkeys(ROLES, over(0, size, tp, pp))):
        trained = {role: over(placements[role].ranks[0], len(placements[role].ranks), pp, tp) for role in ("actor", "critic")}
        assert max(groups_by_rank(run_groups(placements, trained)).values()) <= 34


def test_groups_of_the_70b_run_of_4096_ranks_and_of_roles_that_share_nothing_but_their_ranks() -> None:
    """Counted by hand: 617 groups of a placement, not tensor groups; 256 of a role that are; 256 ranks that send chunks."""
    actor, scorer = over(0, 2048, 8, 8), over(2048, 2048, 8, 8)
    placements = {"actor": actor, **dict.fromkeys(ROLES[1:], scorer)}
    groups = run_groups(placements, {"actor": actor, "critic": scorer})
    pipelines, tensor, others = 2048 // 8, 2048 // 8, 256 + 64 + 32 + 256 + 8 + 1
    assert calls_of(groups) == 1 + 2 * others + 4 * tensor + 5 * pipelines + 2048 // 8 + 1
    counts = groups_by_rank(groups)
    # World, checkpoints, alone; pp, dp, mp, tp_dp, all; a tensor group and a lane a role; tokens; of ends embedding; chunks.
    assert counts[513] == 3 + 5 + 1 + 1 + 1 and counts[1] == counts[513] + 1
    assert counts[2047] == counts[1] and counts[1792] == counts[1] + 1 == counts[0], "the output rank sends chunks, and others"
    assert counts[4095] == 3 + 5 + 3 + 3 + 1 + 1
    for size in (64, 1024):
        layouts = [(2, 4), (4, 2), (8, 8), (1, 16), (4, 4), (2, 8)]
        every = [over(0, size, tp, pp) for tp, pp in layouts]
        placements, trained = dict(zip(ROLES, every, strict=False)), {"actor": every[4], "critic": every[5]}
        assert 30 < max(groups_by_rank(run_groups(placements, trained)).values()) < 64


class FakeGroup:
    def __init__(self, ranks: Sequence[int], viewer: int):
        self.ranks, self.viewer = list(ranks), viewer

    def rank(self) -> int:
        return self.ranks.index(self.viewer)

    def size(self) -> int:
        return len(self.ranks)


LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"placement": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}}},
    "apart": {"placement": {"mode": "disaggregated", "actor": {"pp": 4}, "scorer": {"tp": 2, "pp": 2}}},
    "own layouts": {
        "placement": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}},
        "actor": {"train": {"tp": 2, "pp": 4, "dp": 1}},
        "critic": {"ranks": "0-3", "parallel": {"tp": 4}},
        "reward": {"ranks": "8-9", "parallel": {"dp": 2}},
    },
    "shared sequences": {
        "placement": {"mode": "colocated", "actor": {"tp": 2, "dp": 4}},
        "actor": {"train": {"cp": 2}},
        "critic": {"train": {"tp": 1, "pp": 2, "cp": 4}},
    },
    "divided experts": {
        "placement": {"mode": "colocated", "actor": {"tp": 2, "dp": 4}},
        "actor": {"train": {"ep": 2}},
        "critic": {"train": {"tp": 1, "pp": 2, "dp": 4, "ep": 4}},
    },
}


def laid_out(placement: dict[str, Any], **roles: Any) -> TrainConfig:
    models = {role: {"init": MODEL_70B} | roles.get(role, {}) for role in ("actor", "critic", "reward")}
    return least_config(Path("none"), placement=placement, rewards=[{"kind": "model"}], **models)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_listed_is_what_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = laid_out(**LAYOUTS[name])
    listed = run_groups(role_placements(config), training_placements(config))
    assert listed.pop() == GroupName("checkpoints", tuple(range(world_size(config))))
    for viewer in range(world_size(config)):
        made, topology = _topology(config, viewer, monkeypatch)
        own = [group for group in listed if group.label != ALONE or group.ranks == (viewer,)]
        assert made == own, "in this order"
        assert made[0] == GroupName(ALONE, (viewer,)), "or ranks would have different numbers of groups at a common one"
        waves = in_waves(links_of(topology.site))
        assert [*topology.links.groups] == [link for wave in waves for link in wave if viewer in link[:2]]
        for (source, destination, role, payload), group in topology.links.groups.items():
            assert viewer in (source, destination) and {source, destination} <= set(group.ranks), (role, payload)


def test_links_that_meet_on_two_ranks_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _, topology = _topology(laid_out({"mode": "colocated", "actor": {"pp": 2}}), 1, monkeypatch)
    assert len(topology.links.groups) == 5 == len({id(group) for group in topology.links.groups.values()})


def _topology(config: TrainConfig, viewer: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[GroupName], Topology]:
    """Groups that rank `viewer` makes, in order, and its view of them."""
    made: list[GroupName] = []

    def new_group(ranks: Sequence[int], label: str) -> FakeGroup:
        made.append(GroupName(label, tuple(ranks)))
        return FakeGroup(ranks, viewer)

    monkeypatch.setattr(process_groups, "new_group", new_group)
    monkeypatch.setattr(links_module, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: viewer)
    monkeypatch.setattr(roles, "use_once", lambda groups, device: None)
    monkeypatch.setattr(links_module.Links, "use_once", lambda links, device: None)
    return made, build_topology(config, torch.device("cpu"))


def own_lists(order: Sequence[Link]) -> dict[int, list[Link]]:
    ranks = sorted({end for link in order for end in ends(link)})
    return {rank: [link for link in order if rank in ends(link)] for rank in ranks}


def ends(link: Link) -> tuple[int, int]:
    return link[:2]


@settings(max_examples=200)
@given(site=sites(), fan_out=st.sampled_from([1, 2, FAN_OUT]))
def test_first_use_never_waits_in_a_circle(site: Site, fan_out: int) -> None:
    """Takes no more turns than there are waves: fewer than twice the links of the busiest rank."""
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", fan_out):
        links = links_of(site)
    assert len(set(links)) == len(links)
    waves = in_waves(links)
    order = [link for wave in waves for link in wave]
    assert sorted(order) == sorted(links)
    for wave in waves:
        assert max(Counter(end for link in wave for end in ends(link)).values()) == 1
    lists = own_lists(order)
    assert turns(lists, ends) == len(waves) <= max(0, 2 * max(map(len, lists.values()), default=0) - 1)


def test_waves_do_not_grow_with_replicas_and_another_order_may_wait_in_a_circle() -> None:
    few, many = (links_of(colocated((8, 8, dp))) for dp in (1, 32))
    assert len(many) == 32 * len(few) > 8000 and len(in_waves(many)) == len(in_waves(few)) <= 15
    thousands = links_of(disaggregated((8, 8, 32), (8, 8, 32)))
    assert len(in_waves(thousands)) <= len(in_waves(few)) + FAN_OUT, "as many listen as decode"
    chain = [link for link in few if link[2] == "reward"]
    assert len(in_waves(chain)) == 2 and turns(own_lists(chain), ends) == 7
    # The judge itself: a rank that sends first and receives then waits for one that does the same.
    own = own_lists([link for wave in in_waves(links_of(colocated((1, 4, 1)))) for link in wave])
    lists = {rank: sorted(links, key=lambda link: link[0] != rank) for rank, links in own.items()}
    assert turns(own, ends) is not None and turns(lists, ends) is None


@settings(max_examples=50)
@given(site=sites())
def test_a_round_uses_the_links_of_its_site(site: Site) -> None:
    round_ = make_round(site, sequences=1)
    schedule = add_communication(intra(round_, site, Costs()), round_, site)
    assert {link_of(action) for action in schedule if action.op in (Op.SEND, Op.RECV)} == set(links_of(site))


def hops(site: Site) -> dict[int, int]:
    """Messages after which a chunk is on each rank; senders are looked at in their order."""
    found = dict.fromkeys(site.placements["actor"].ranks, 0)
    for sender, listeners in site.feeds.items():
        assert sender in found, f"rank {sender} sends what it has not been told"
        for listener in listeners:
            assert listener not in found, f"rank {listener} is told twice"
            found[listener] = found[sender] + 1
    return found


@settings(max_examples=300)
@given(actor=st.tuples(*[st.integers(1, 3)] * 3), num_listeners=st.integers(0, 300), most=st.integers(1, 9))
def test_every_listener_is_told_once_by_a_rank_that_knows(actor: tuple[int, int, int], num_listeners: int, most: int) -> None:
    site = make_site(actor, {"reward": (math.prod(actor), 1, 1, num_listeners)} if num_listeners else {})
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", most):
        found = hops(site)
    assert {*found} == {*site.ranks} and max(map(len, site.feeds.values()), default=0) <= most
    assert {listener: sender for sender, own in site.feeds.items() for listener in own} == site.fed_by
    assert list(site.feeds)[:1] == [site.source][:num_listeners]
    assert (max(found.values()) <= 1) == (math.prod(actor) * most >= num_listeners)


@pytest.mark.parametrize("actor", [1, 8, 512, 8192])
@pytest.mark.parametrize("scorers", [1, 9, 512, 8192])
def test_messages_and_groups_stay_few_however_many_listen(actor: int, scorers: int) -> None:
    site = disaggregated((1, 1, actor), (1, 1, scorers))
    assert 2 * max(map(len, site.feeds.values())) <= 2 * FAN_OUT < 64
    trained = {role: site.placements[role] for role in ("actor", "critic")}
    assert max(groups_by_rank(run_groups(site.placements, trained)).values()) < 16
    # Each hop multiplies the senders: eight ranks more tell the chunk for each that has been told it.
    assert max(hops(site).values()) <= 1 + math.ceil(math.log(max(1.0, scorers / (actor * FAN_OUT)), FAN_OUT) + 1e-9)


def test_senders_lie_on_as_many_hosts_as_there_are_and_are_a_group_with_their_listeners() -> None:
    """2,048 ranks of an actor, eight a host: 256 of them send, one on each host, the output rank among them."""
    site = disaggregated((8, 8, 32), (8, 8, 32))
    senders = list(site.feeds)
    assert senders[0] == site.source == 1792 and len(senders) == 256
    assert sorted(rank // 8 for rank in senders) == list(range(256))
    site = disaggregated((1, 1, 1), (1, 1, 20))
    lanes = [lane.ranks for lane in lanes_of(site) if lane.links[0][3] is Payload.CHUNK]
    assert lanes == [(0, *range(1, 9)), (1, *range(9, 17)), (2, *range(17, 21))]
    # Ranks that update the critic pass nothing on where others can: they come late, and whom they told would wait for them.
    critic, others = RolePlacement((1, 2, 3, 4), dp=4), RolePlacement(tuple(range(5, 41)), dp=36)
    site = Site({"actor": RolePlacement((0,)), "critic": critic, "reference": others, "reward": others})
    assert set(site.feeds) == {0, 5, 6, 7, 8}
    assert all(site.fed_by[rank] == 8 for rank in critic.ranks)
