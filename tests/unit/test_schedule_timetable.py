"""Times of units: what they prove, and the lists that are made of them."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.checker import FaultKind, check
from oppo_megatron.schedule.checking.proof import prove, runs_in_time
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.links import ONE_QUEUE, Transport
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import Times, Timetable, add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import ample_budgets, colocated, disaggregated, make_round, make_site, split_scorers
from tests.unit.test_schedule_generators import SCORERS, cases

SITES = {
    "colocated": colocated((1, 4, 2)), "colocated, tensor ranks": colocated((2, 2, 1)),
    "disaggregated": disaggregated((1, 2, 2), (1, 2, 1)), "split scorers": split_scorers((1, 2, 2)),
}  # fmt: skip


def table_of(generator: str, round_: Round, site: Site, costs: Costs) -> Timetable:
    table = GENERATORS[generator](round_, site, costs).actions
    assert isinstance(table, Timetable)
    return table


def moved(table: Timetable, rng: random.Random) -> Timetable:
    """One unit of one stage begins at another time: that of another unit, or close to it, or it changes places with it."""
    team = rng.choice([team for team, times in table.times.items() if times.starts.size])
    starts = table.times[team].starts.copy()
    stage, unit = rng.randrange(len(starts)), rng.randrange(starts.shape[1])
    other = rng.choice([times.starts for times in table.times.values() if times.starts.size] + [starts] * 2)
    at = rng.randrange(len(other)), rng.randrange(other.shape[1])
    here, there = starts[stage, unit], other[at]
    starts[stage, unit] = max(0, there + rng.choice((-1, 0, 1)))
    if other is starts and rng.random() < 0.5:
        starts[at] = here
    return replace(table, times={**table.times, team: Times(starts, table.times[team].placed)})


@given(case=cases(), generator=st.sampled_from(sorted(GENERATORS)), seed=st.integers(0, 10**6))
def test_lists_of_times_that_are_proved_are_sound(case: tuple[Round, Site, Costs], generator: str, seed: int) -> None:
    round_, site, costs = case
    table, rng = table_of(generator, round_, site, costs), random.Random(seed)
    lines = [costs.decode_at(stage) for stage in range(site.placements["actor"].pp)]
    lines += [costs.prefill_at(role, stage) for role, own in site.placements.items() for stage in range(own.pp)]
    if all(line(1) for line in lines):  # units that take no time may begin together
        assert runs_in_time(table, round_, site), "all that generators make is proved"
    for _ in range(5 if any(times.starts.size for times in table.times.values()) else 0):
        table = moved(table, rng)
        if runs_in_time(table, round_, site):
            schedule = add_communication(Schedule(table), round_, site)
            assert check(schedule, round_, site, ample_budgets(site), costs) == []


@pytest.mark.parametrize("generator", sorted(GENERATORS))
@pytest.mark.parametrize("name", SITES)
def test_times_that_are_moved_are_refused_where_the_lists_are_harmed(name: str, generator: str) -> None:
    site, rng, found = SITES[name], random.Random(7), Counter[tuple[bool, bool]]()
    round_ = make_round(site, steps=4, micro_batches=2, prefills=3, prompts=1)
    table = table_of(generator, round_, site, Costs())
    assert runs_in_time(table, round_, site)
    for _ in range(100):
        other = moved(table, rng)
        found[runs_in_time(other, round_, site), prove(Schedule(dict(other)), round_, site)] += 1
    assert not found[True, False], "proved by its times, and not by its lists"
    assert found[False, False] > 25 and found[True, True] > 10


def test_times_of_another_round_or_site_prove_nothing() -> None:
    site = SITES["colocated"]
    round_ = make_round(site, steps=4, micro_batches=2, prefills=3)
    table = table_of("woven", round_, site, Costs())
    assert not runs_in_time(table, replace(round_, index=round_.index + 1), site)
    for asked in (make_round(site, steps=4, micro_batches=2, prefills=4), make_round(site, steps=5, micro_batches=2, prefills=3)):
        assert not runs_in_time(table, asked, site)
        assert not runs_in_time(replace(table, round=asked), asked, site)
    without = {team: times for team, times in table.times.items() if team != ("critic", 1)}
    assert not runs_in_time(replace(table, times=without), round_, site)
    fewer = {team: Times(times.starts[1:], times.placed[1:]) for team, times in table.times.items()}
    assert not runs_in_time(replace(table, times=fewer), round_, site)
    assert not runs_in_time(table, round_, colocated((1, 2, 4)))


def test_units_of_one_start_come_as_they_were_placed() -> None:
    site = SITES["colocated"]
    table = table_of("intra", make_round(site, steps=2, micro_batches=1, prefills=2), site, Costs())
    rank = site.ranks[0]
    same = {team: Times(np.zeros_like(times.starts), times.placed) for team, times in table.times.items()}
    turned = {team: Times(starts, -placed) for team, (starts, placed) in same.items()}
    in_order = replace(table, times=same)[rank]
    assert {a.role for a in in_order[:4]} != {"actor"} and in_order[-1].role == "actor"
    units = [a for a in replace(table, times=turned)[rank] if a.op.value in ("decode", "prefill")]
    assert units == [a for a in in_order if a.op.value in ("decode", "prefill")][::-1]


def test_a_step_that_begins_before_its_tokens_are_drawn_is_not_proved_nor_tokens_held_in_a_circle() -> None:
    """Stage 0 waits for tokens before it prefills, and stage 1 for that prefill before it draws them."""
    site = colocated((1, 2, 1))
    round_ = make_round(site, steps=2, micro_batches=1, prefills=1, prompts=0, sequences=1)
    placed = iter(range(100))

    def table(second: int) -> Timetable:
        starts = {"actor": [[0, second], [100, 200]]} | {role: [[3 + n], [6 + n]] for n, role in enumerate(SCORERS)}
        times = {(role, 0): np.array(own, dtype=np.int64) for role, own in starts.items()}
        return Timetable(round_, site, {team: Times(own, np.full_like(own, next(placed))) for team, own in times.items()})

    for second, kinds in ((101, set()), (2, {FaultKind.DEADLOCK}), (100, set())):
        faults = check(add_communication(Schedule(table(second)), round_, site), round_, site, ample_budgets(site))
        assert {fault.kind for fault in faults} == kinds
        assert runs_in_time(table(second), round_, site) == (second == 101)
    # Rank 1 sends those of two micro-batches, which rank 0 takes behind a prefill that rank 1 has begun after that.
    site = Site({"actor": RolePlacement((0, 1), pp=2), "critic": RolePlacement((1, 0), pp=2)})
    round_ = make_round(site, steps=2, micro_batches=2, prefills=1, prompts=0)
    starts = {("actor", 0): np.array([[0, 1, 40, 41], [10, 11, 50, 51]]), ("critic", 0): np.array([[20], [30]])}
    table = Timetable(round_, site, {team: Times(own, np.zeros_like(own)) for team, own in starts.items()})
    for most, sound in ((1, False), (2, True)):
        assert proved(table, round_, site, holding(most, Payload.TOKENS)) == sound


def holding(most: int, payload: Payload = Payload.HIDDEN) -> Transport:
    return replace(ONE_QUEUE, in_flight={payload: most})


def goes_through(table: Mapping[int, tuple[Action, ...]], round_: Round, site: Site, most: int) -> bool:
    return not simulate(add_communication(Schedule(table), round_, site), round_, site, transport=holding(most)).stuck


def proved(table: Timetable, round_: Round, site: Site, transport: Transport) -> bool:
    """By its times and by its lists alike."""
    found = {prove(Schedule(lists), round_, site, transport) for lists in (table, dict(table))}
    assert len(found) == 1
    return found.pop()


@given(case=cases(), generator=st.sampled_from(sorted(GENERATORS)), most=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_sends_in_nobodys_way_let_all_go_through(case: tuple[Round, Site, Costs], generator: str, most: int, seed: int) -> None:
    round_, site, costs = case
    table, rng = table_of(generator, round_, site, costs), random.Random(seed)
    for _ in range(5 if any(times.starts.size for times in table.times.values()) else 0):
        if runs_in_time(table, round_, site):
            assert proved(table, round_, site, holding(most)) == goes_through(table, round_, site, most)
        table = moved(table, rng)


CIRCLES = {
    "through tokens": ({"actor": ((0, 1), 1), "critic": ((1, 0), 1)}, [[0, 20], [10, 40]], 2),
    "at one of two tensor ranks": ({"actor": ((0, 1, 2, 3), 2), "critic": ((1, 2), 1)}, [[10], [20]], 1),
}
"""Ranks and tensor parallelism of two pipelines of two stages, starts of the actor's decode micro-steps, and how many of the
critic's hidden states may be on their way."""


@pytest.mark.parametrize("name", CIRCLES)
def test_a_send_that_is_held_in_a_circle(name: str) -> None:
    """The critic's last hidden state waits for the first, which is taken behind what its sender is to do next."""
    placements, decodes, allowed = CIRCLES[name]
    site = Site({role: RolePlacement(ranks, tp, 2) for role, (ranks, tp) in placements.items()})
    round_ = make_round(site, steps=len(decodes[0]), micro_batches=1, prefills=allowed + 1, prompts=0)
    critic = np.array([[1], [30]]) + np.arange(allowed + 1)
    starts = {("actor", 0): np.array(decodes), ("critic", 0): critic}
    table = Timetable(round_, site, {team: Times(own, np.zeros_like(own)) for team, own in starts.items()})
    assert runs_in_time(table, round_, site)
    for most, sound in ((allowed, False), (allowed + 1, True)):
        assert goes_through(table, round_, site, most) == proved(table, round_, site, holding(most)) == sound


def turned(lists: Mapping[int, tuple[Action, ...]], rng: random.Random, times: int) -> dict[int, tuple[Action, ...]]:
    """Now and again two neighbouring units of a rank, of different roles, change places."""
    units: dict[int, list[list[Action]]] = {rank: [] for rank in lists}
    for action in itertools.chain.from_iterable(lists.values()):
        if action.op in (Op.SAMPLE, Op.SCORE):
            units[action.rank][-1].append(action)
        else:
            units[action.rank].append([action])
    for _ in range(times):
        each = units[rng.choice([rank for rank, each in units.items() if len(each) > 1])]
        at = rng.randrange(len(each) - 1)
        if each[at][0].role != each[at + 1][0].role:
            each[at], each[at + 1] = each[at + 1], each[at]
    return {rank: tuple(itertools.chain.from_iterable(each)) for rank, each in units.items()}


@pytest.mark.parametrize("name", [*SITES, "scorers of one rank"])
def test_a_run_of_units_ends_where_a_simulation_ends(name: str) -> None:
    narrow = make_site((2, 2, 1), {"critic": (0, 1, 2, 2), "reward": (0, 1, 4, 1)})
    site, rng, found = SITES.get(name, narrow), random.Random(11), Counter[bool]()
    for generator, (prefills, batches), most in itertools.product(GENERATORS, ((3, 2), (5, 3)), (1, 2)):
        round_ = make_round(site, steps=3, micro_batches=batches, prefills=prefills, prompts=2)
        table = table_of(generator, round_, site, Costs())
        assert prove(Schedule(table), round_, site, holding(most)) == goes_through(table, round_, site, most)
        for times in (0, 1, 3, 10, 30, 100):
            lists = turned(table, rng, times)
            sound = goes_through(lists, round_, site, most)
            assert prove(Schedule(lists), round_, site, holding(most)) == sound
            found[sound] += 1
    assert min(found[True], found[False]) > 3, found
