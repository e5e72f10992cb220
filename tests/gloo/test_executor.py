"""The executor on real ranks: it does what the schedule says, in its order, and never waits for ever.
The oracle for a wait is the dry run of the schedule in virtual time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.gloo.jobs_executor import Outcome
from tests.support.ranks import run_mortal_ranks, run_ranks
from tests.support.schedules import build, colocated, disaggregated, make_round, make_site, split_scorers

TIMEOUT_S = 5.0  # a busy machine may let a rank wait for a part of it

SITES: dict[str, Site] = {
    "PP2": colocated((1, 2, 1)),
    "DP2 | 1": disaggregated((1, 1, 2), (1, 1, 1)),
    "PP2xDP2": colocated((1, 2, 2)),
    "TP2xPP2": colocated((2, 2, 1)),
    "PP2 | PP2": disaggregated((1, 2, 1), (1, 2, 1)),
    "PP4, scorers TP2xPP2": make_site((1, 4, 1), {role: (0, 2, 2, 1) for role in ("reference", "critic", "reward")}),
    "PP2, split": split_scorers((1, 2, 1)),
}


def ranks_of(site: Site) -> list[int]:
    return sorted({rank for placement in site.placements.values() for rank in placement.ranks})


def schedule_of(site: Site, generator: str = "woven") -> tuple[Schedule, Round]:
    round_ = make_round(site, steps=3, micro_batches=2, prefills=2)
    return add_communication(GENERATORS[generator](round_, site, Costs()), round_, site), round_


@pytest.mark.parametrize("name", SITES)
def test_what_is_done_is_what_the_schedule_says(name: str) -> None:
    """Every generator and random sound orders: order is kept, and each message is the one asked for."""
    site = SITES[name]
    made = [schedule_of(site, generator)[0] for generator in GENERATORS]
    made += [build(make_round(site, prefills=3), site, random.Random(seed)) for seed in range(3)]
    world = len(ranks_of(site))
    answers = run_ranks(world, "tests.gloo.jobs_executor:carry_out", placements=site.placements, schedules=made, late_s=60.0)
    for rank, outcomes in enumerate(answers):
        for schedule, outcome in zip(made, outcomes, strict=True):
            assert outcome.error is None
            assert outcome.done == [str(action) for action in schedule.of(rank)]


def test_rounds_follow_each_other_without_a_pause() -> None:
    """A rank may be rounds ahead of one that only listens; more of them than may be on their way at once."""
    site = disaggregated((1, 1, 1), (1, 1, 1))
    schedule = build(make_round(site, steps=1, micro_batches=1, prefills=1, prompts=0), site)
    answers = run_ranks(
        2, "tests.gloo.jobs_executor:carry_out", placements=site.placements, schedules=[schedule], late_s=60.0, rounds=100
    )
    assert [len(outcomes[0].done) for outcomes in answers] == [100 * len(schedule.of(rank)) for rank in (0, 1)]


def without(schedule: Schedule, action: Action) -> Schedule:
    lists = dict(schedule.actions)
    lists[action.rank] = tuple(own for own in lists[action.rank] if own != action)
    return Schedule(lists)


def until(schedule: Schedule, action: Action) -> Schedule:
    own = schedule.of(action.rank)
    return Schedule({**schedule.actions, action.rank: own[: own.index(action)]})


WITHHELD: dict[str, tuple[str, Callable[[Action], bool]]] = {
    "PP2, a hidden state": ("PP2", lambda a: a.payload is Payload.HIDDEN and a.role == "actor" and a.step == 1),
    "DP2 | 1, the chunk": ("DP2 | 1", lambda a: a.payload is Payload.CHUNK),
}


@pytest.mark.parametrize("case", WITHHELD)
def test_a_withheld_message_is_named_by_all_who_wait_for_it(case: str) -> None:
    name, is_it = WITHHELD[case]
    site = SITES[name]
    schedule, round_ = schedule_of(site)
    lost = next(action for action in schedule if action.op is Op.SEND and is_it(action))
    broken = without(schedule, lost)
    stuck = simulate(broken, round_, site).stuck
    assert lost.peer in stuck
    answers = run_ranks(
        len(ranks_of(site)),
        "tests.gloo.jobs_executor:carry_out",
        placements=site.placements,
        schedules=[broken],
        late_s=TIMEOUT_S,
    )
    for rank, (outcome,) in enumerate(answers):
        own = broken.of(rank)
        if rank not in stuck:
            # It has done its part; what it sent to a rank that did not get so far is never taken.
            assert outcome.done == [str(action) for action in own]
            assert outcome.error is None or named(outcome, own).op is Op.SEND
            continue
        assert outcome.done == [str(action) for action in own[: stuck[rank].position]]
        assert named(outcome, own) == stuck[rank].action
        assert f"rank {rank} waited" in str(outcome.error) and f"runtime.timeout_s is {TIMEOUT_S:g}" in str(outcome.error)
        assert outcome.seconds < len(answers) * TIMEOUT_S + 3


KILLED: dict[str, tuple[str, int, str]] = {
    "PP2, the last stage in its decoding": ("PP2", 1, "decode actor m1 c2 s1"),
    "PP2, the first stage in a prefill": ("PP2", 0, "prefill reward m1 c1"),
    "DP2 | 1, a replica before the gather": ("DP2 | 1", 1, "sample actor m0 c2 s2"),
    "TP2xPP2, one shard of a stage": ("TP2xPP2", 3, "decode actor m0 c2 s1"),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_rank_is_felt_and_named_by_all_who_need_it(case: str) -> None:
    name, victim, text = KILLED[case]
    site = SITES[name]
    schedule, round_ = schedule_of(site)
    last = next(action for action in schedule.of(victim) if str(action) == text)
    stuck = simulate(until(schedule, last), round_, site).stuck
    world = len(ranks_of(site))
    survivors = set(range(world)) - {victim}
    assert survivors and survivors <= set(stuck), "all of them depend on it"
    answers = run_mortal_ranks(
        world,
        "tests.gloo.jobs_executor:carry_out",
        placements=site.placements,
        schedules=[schedule],
        late_s=TIMEOUT_S,
        last_words=(victim, text),
    )
    assert answers[victim] is None
    for rank in survivors:
        assert answers[rank] is not None
        outcome, own = answers[rank][0], schedule.of(rank)
        waited = named(outcome, own)
        # At the latest where the dry run is stuck; sooner where the dead rank took a message along that it had sent.
        assert own.index(waited) <= stuck[rank].position, (str(waited), str(stuck[rank].action))
        assert waited.op in (Op.SEND, Op.RECV, Op.GATHER) or site.placements[waited.role].tp > 1
        assert outcome.done == [str(action) for action in own[: own.index(waited)]] or waited.op is Op.SEND
        assert outcome.seconds < world * TIMEOUT_S + 3


def named(outcome: Outcome, own: tuple[Action, ...]) -> Action:
    assert outcome.error is not None
    found = re.search(r"in vain for `([^`]+)`", outcome.error)
    assert found, outcome.error
    return next(action for action in own if str(action) == found[1])
