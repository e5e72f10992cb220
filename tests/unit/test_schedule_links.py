"""Links: those of a site are those that its rounds use, and their first use comes to its end in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.schedule.actions import Op
from oppo_megatron.schedule.links import Link, in_waves, link_of
from oppo_megatron.schedule.rounds import FAN_OUT, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import intra
from tests.support.first_use import turns
from tests.support.schedules import colocated, disaggregated, links_of, make_round
from tests.unit.test_schedule_components import sites


def own_lists(order: Sequence[Link]) -> dict[int, list[Link]]:
    """Each rank's links, in the order given."""
    ranks = sorted({end for link in order for end in ends(link)})
    return {rank: [link for link in order if rank in ends(link)] for rank in ranks}


def ends(link: Link) -> tuple[int, int]:
    return link[:2]


@settings(deadline=None, max_examples=200)
@given(site=sites(), fan_out=st.sampled_from([1, 2, FAN_OUT]))
def test_first_use_never_waits_in_a_circle(site: Site, fan_out: int) -> None:
    """And takes no more turns than there are waves, of which there are fewer than twice the links of the busiest rank."""
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


def test_an_order_of_each_rank_s_own_may_wait_in_a_circle() -> None:
    """The judge itself: a rank that sends first and receives then waits for one that does the same."""
    order = [link for wave in in_waves(links_of(colocated((1, 4, 1)))) for link in wave]
    lists = {rank: sorted(own, key=lambda link: link[0] != rank) for rank, own in own_lists(order).items()}
    assert turns(own_lists(order), ends) is not None and turns(lists, ends) is None


def test_waves_do_not_grow_with_replicas() -> None:
    """Thousands of links: as many waves as in one replica, where the order of making takes a turn for every stage."""
    few, many = (links_of(colocated((8, 8, dp))) for dp in (1, 32))
    assert len(many) == 32 * len(few) > 8000 and len(in_waves(many)) == len(in_waves(few)) <= 15
    thousands = links_of(disaggregated((8, 8, 32), (8, 8, 32)))
    assert len(in_waves(thousands)) <= len(in_waves(few)) + FAN_OUT, "as many listen as decode"
    chain = [link for link in few if link[2] == "reward"]
    assert len(in_waves(chain)) == 2 and turns(own_lists(chain), ends) == 7


@settings(deadline=None, max_examples=50)
@given(site=sites())
def test_a_round_uses_the_links_of_its_site(site: Site) -> None:
    """All of them where every role and replica has work, and no other."""
    round_ = make_round(site, sequences=1)
    schedule = add_communication(intra(round_, site, Costs()), round_, site)
    assert {link_of(action) for action in schedule if action.op in (Op.SEND, Op.RECV)} == set(links_of(site))


def test_listeners_are_reached_one_after_the_other() -> None:
    """All their links are those of one rank: there a wave is needed for each."""
    site = disaggregated((1, 1, 1), (1, 1, 5))
    assert [len(wave) for wave in in_waves(links_of(site))] == [1] * 5
