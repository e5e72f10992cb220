"""Who sends chunks to whom: every listener has one sender that knows them in time, and no rank sends many."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Payload
from oppo_megatron.schedule.links import groups_by_rank, lanes_of, run_groups
from oppo_megatron.schedule.rounds import FAN_OUT, Site
from tests.support.schedules import disaggregated, make_site

SCORERS = ("reference", "critic", "reward")


def hops(site: Site) -> dict[int, int]:
    """Messages after which a chunk is on each rank; senders are looked at in their order."""
    found = dict.fromkeys(site.placements["actor"].ranks, 0)
    for sender, listeners in site.feeds.items():
        assert sender in found, f"rank {sender} sends what it has not been told"
        for listener in listeners:
            assert listener not in found, f"rank {listener} is told twice"
            found[listener] = found[sender] + 1
    return found


@settings(deadline=None, max_examples=300)
@given(
    actor=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    num_listeners=st.integers(0, 300),
    most=st.integers(1, 9),
)
def test_every_listener_is_told_once_by_a_rank_that_knows(actor: tuple[int, int, int], num_listeners: int, most: int) -> None:
    scorers = {"reward": (math.prod(actor), 1, 1, num_listeners)} if num_listeners else {}
    site = make_site(actor, scorers)
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", most):
        found = hops(site)
    assert {*found} == {*site.ranks} and max(map(len, site.feeds.values()), default=0) <= most
    assert {listener: sender for sender, own in site.feeds.items() for listener in own} == site.fed_by
    assert list(site.feeds)[:1] == [site.source][:num_listeners]
    enough = math.prod(actor) * most >= num_listeners
    assert (max(found.values()) <= 1) == enough


@pytest.mark.parametrize("actor", [1, 2, 8, 64, 512, 2048, 8192])
@pytest.mark.parametrize("scorers", [1, 8, 9, 64, 512, 2048, 8192])
def test_messages_and_groups_stay_few_however_many_listen(actor: int, scorers: int) -> None:
    site = disaggregated((1, 1, actor), (1, 1, scorers))
    assert 2 * max(map(len, site.feeds.values())) <= 2 * FAN_OUT < 64
    trained = {role: site.placements[role] for role in ("actor", "critic")}
    assert max(groups_by_rank(run_groups(site.placements, trained)).values()) < 16
    # Each hop multiplies the senders: eight ranks more tell the chunk for each that has been told it.
    assert max(hops(site).values()) <= 1 + math.ceil(math.log(max(1.0, scorers / (actor * FAN_OUT)), FAN_OUT) + 1e-9)


def test_senders_lie_on_as_many_hosts_as_there_are() -> None:
    """2,048 ranks of an actor, eight a host: 256 of them send, one on each host, the output rank among them."""
    site = disaggregated((8, 8, 32), (8, 8, 32))
    senders = list(site.feeds)
    assert senders[0] == site.source == 1792 and len(senders) == 256
    assert sorted(rank // 8 for rank in senders) == list(range(256))


def test_ranks_that_update_the_critic_pass_nothing_on_where_others_can() -> None:
    """They come late, and whom they told would wait for them."""
    critic, others = RolePlacement((1, 2, 3, 4), dp=4), RolePlacement(tuple(range(5, 41)), dp=36)
    site = Site({"actor": RolePlacement((0,)), "critic": critic, "reference": others, "reward": others})
    assert set(site.feeds) == {0, 5, 6, 7, 8}
    assert all(site.fed_by[rank] == 8 for rank in critic.ranks)


def test_a_sender_and_its_listeners_are_a_group() -> None:
    site = disaggregated((1, 1, 1), (1, 1, 20))
    lanes = [lane.ranks for lane in lanes_of(site) if lane.links[0][3] is Payload.CHUNK]
    assert lanes == [(0, *range(1, 9)), (1, *range(9, 17)), (2, *range(17, 21))]
