"""NCCL's rules: what the generators make keeps them, what only gloo survives is found, and where."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement, role_placements
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.checker import Fault, check
from oppo_megatron.schedule.checking.proof import prove, require_provable
from oppo_megatron.schedule.checking.timeline import coordinates_at, same_action, simulate
from oppo_megatron.schedule.links import (
    COLD,
    GLOO,
    NCCL,
    ONE_QUEUE,
    TRANSPORTS,
    Link,
    Transport,
    link_of,
    most_streams,
    run_groups,
    transport_of,
)
from oppo_megatron.schedule.plan import new_planner
from oppo_megatron.schedule.preview import first_step
from oppo_megatron.schedule.rounds import Growth, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.generators import GENERATORS, one_by_one
from tests.support.configs import least_config
from tests.support.schedules import ample_budgets, make_round
from tests.unit.test_schedule_components import mutate, sound_schedule
from tests.unit.test_schedule_generators import cases

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
SHAPE = {"model_type": "llama", **dict(zip(SIZES, (64, 8, 8, 128, 256), strict=True))}


def stuck(schedule: Schedule, site: Site, transport: Transport) -> dict[int, int]:
    """The ranks that do not come to their end, and where: the rules once more, by looking at all ranks until none moves."""
    lists = {rank: schedule.of(rank) for rank in {*schedule.actions, *site.ranks}}
    at, sent, taken, made = dict.fromkeys(lists, 0), Counter[Link](), Counter[Link](), set[Link]()

    def now(rank: int | None) -> Action | None:
        return lists[rank][at[rank]] if rank in lists and at[rank] < len(lists[rank]) else None

    def together(action: Action) -> tuple[int, ...]:
        if action.op is Op.GATHER:
            return site.placements["actor"].ranks
        coords = coordinates_at(site, action.rank)[action.role]
        return site.placements[action.role].stage_ranks(coords.replica, coords.stage)

    def goes(action: Action) -> bool:
        if action.peer is None:
            return all(same_action(now(rank), action) for rank in together(action))
        link, other = link_of(action), now(action.peer)
        if not transport.made and link not in made:
            if other is None or other.peer is None or link_of(other) != link:
                return False
            made.add(link)
        if action.op is Op.RECV:
            return sent[link] > taken[link]
        return sent[link] - taken[link] < transport.in_flight.get(action.payload, 10**9)

    moved = True
    while moved:
        moved = False
        for rank in lists:
            while (action := now(rank)) is not None and goes(action):
                moved = True
                if action.peer is not None:
                    (sent if action.op is Op.SEND else taken)[link_of(action)] += 1
                for member in (rank,) if action.peer is not None else together(action):
                    at[member] += 1
    return {rank: at[rank] for rank in lists if now(rank) is not None}


def faults_of(schedule: Schedule, round_: Round, site: Site, transport: Transport) -> list[Fault]:
    return check(schedule, round_, site, ample_budgets(site), transport=transport)


def config(placement: dict[str, Any], batch: int = 16, chunk: int = 16) -> TrainConfig:
    return least_config(
        Path("none"), placement=placement, **dict.fromkeys(("actor", "critic", "reward"), {"init": SHAPE}),
        rewards=[{"kind": "model"}], data={"path": "none", "max_prompt_tokens": 32}, runtime={"micro_batch_tokens": 16 * batch},
        rollout={"batch_size": batch, "max_response_tokens": 64},
        overlap={"chunk": chunk, "delta": {"rule": "fixed", "initial": 8, "max": 8}},
    )  # fmt: skip


def whole_step(placement: dict[str, Any], generator: str) -> tuple[Schedule, Round, Site]:
    """All rounds of the first step as one schedule: what is made in a round is there in the next one.  And its first round."""
    settings = config(placement)
    site = Site(role_placements(settings))
    planner = new_planner(settings, site, generator, lambda _: settings.rollout.max_response_tokens)
    lists: dict[int, list[Action]] = {rank: [] for rank in site.ranks}
    rounds = [*first_step(settings, planner, 32)]
    for planned in rounds:
        for rank, own in planned.schedule.shifted(planned.round.index - 1).actions.items():
            lists[rank] += own
    return Schedule({rank: tuple(own) for rank, own in lists.items()}), rounds[0].round, site


STEPS: dict[str, dict[str, Any]] = {
    "colocated pp2": {"mode": "colocated", "actor": {"pp": 2}}, "colocated pp4": {"mode": "colocated", "actor": {"pp": 4}},
    "colocated tp2 pp2 dp2": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}},
    "disaggregated": {"mode": "disaggregated"},
    "disaggregated pp2": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"pp": 2}},
}  # fmt: skip


@pytest.mark.parametrize("generator", sorted(GENERATORS))
@pytest.mark.parametrize("name", STEPS)
def test_the_first_step_of_a_run_with_and_without_its_communicators(name: str, generator: str) -> None:
    """All go through once these are made; else the four stages of a woven round wait for each other in their first sends."""
    schedule, round_, site = whole_step(STEPS[name], generator)
    assert simulate(schedule, round_, site, transport=NCCL).stuck == {}
    cold = {rank: str(each.action) for rank, each in simulate(schedule, round_, site, transport=COLD).stuck.items()}
    waits = {r: f"send hidden {role} m0 c0 -> {r + 1}" for r, role in enumerate(("reward", "critic", "reference"))}
    assert cold == (waits | {3: "send tokens actor m0 c1 s0 -> 0"} if (name, generator) == ("colocated pp4", "woven") else {})


def test_the_fault_names_ranks_actions_links_and_why() -> None:
    site = Site(dict.fromkeys(("actor", "critic", "reward", "reference"), RolePlacement((0, 1, 2, 3), pp=4)))
    round_ = make_round(site, steps=3)
    schedule = add_communication(GENERATORS["woven"](round_, site, Costs()), round_, site)
    assert faults_of(schedule, round_, site, GLOO) == faults_of(schedule, round_, site, NCCL) == []
    (fault,) = faults_of(schedule, round_, site, COLD)
    assert fault.kind == "deadlock" and fault.action is not None and fault.action.op is Op.SEND
    assert f"rank {fault.rank} waits at `{fault.action}` (the first use of its communicator" in fault.message
    assert "make the communicators before the round" in fault.message


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), transport=st.sampled_from([GLOO, NCCL, COLD, ONE_QUEUE]))
def test_who_waits_for_ever_is_found_whoever_is_looked_at_first(seed: int, transport: Transport) -> None:
    rng = random.Random(seed)
    _, schedule, round_, site = sound_schedule(rng)
    if not any(True for _ in schedule):
        return
    for made in (schedule, mutate(schedule, rng)[1]):
        found = simulate(made, round_, site, transport=transport).stuck
        if not any(each.mistaken for each in found.values()):  # the judge takes what comes
            assert {rank: each.position for rank, each in found.items()} == stuck(made, site, transport)


def test_when_a_send_is_let_go() -> None:
    """Prefills of 1 s and 10 s on the stages, 0.5 s a message: the second stage takes messages at 1.5 and 11.5."""
    site = Site({"actor": RolePlacement((0, 1), pp=2), "reward": RolePlacement((0, 1), pp=2)})
    round_ = Round(1, 0, (), {"reward": (tuple((Growth(j, 0, 4, 4),) for j in range(3)),)})
    costs = Costs(prefill={"reward": (Linear(1, 0), Linear(10, 0))}, score=Linear(0, 0), message_s=0.5)
    schedule = add_communication(GENERATORS["intra"](round_, site, costs), round_, site)
    for transport, sent_s in (NCCL, [1.0, 2.0, 3.0]), (COLD, [1.0, 2.0, 3.0]), (ONE_QUEUE, [1.0, 2.0, 11.5]):
        assert sent(schedule, round_, site, costs, transport) == sent_s
    # Rank 1 prefills for the critic, 3 s, before it receives for the reward model: a first send goes when its receiver comes.
    site = Site({"actor": RolePlacement((0,)), "critic": RolePlacement((1,)), "reward": RolePlacement((0, 1), pp=2)})
    round_ = replace(round_, prefill=round_.prefill | {"critic": (((Growth(9, 0, 4, 4),),),)})
    costs = Costs(prefill={"critic": Linear(3, 0), "reward": Linear(1, 0)}, score=Linear(0, 0), message_s=0.0)
    schedule = add_communication(GENERATORS["sequential"](round_, site, costs), round_, site)
    assert schedule.of(1)[0].role == "critic"
    for transport, sent_s in (NCCL, [1, 2, 3]), (COLD, [3, 4, 5]):
        assert sent(schedule, round_, site, costs, transport) == sent_s


def sent(schedule: Schedule, *played: Any) -> list[float]:
    return [span.end_s for span in simulate(schedule, *played).spans[0] if span.action.op is Op.SEND]


def test_a_planner_takes_another_order_where_one_queue_would_hang() -> None:
    """Stage 0 weaves two prefills into a gap before stage 1 takes the first one's hidden state."""
    settings = config(STEPS["colocated pp2"], batch=64, chunk=8)
    site = Site(role_placements(settings))

    def rounds(transport: Transport, rank: int | None) -> Iterator[tuple[Round, Schedule]]:
        most = settings.rollout.max_response_tokens
        planner = new_planner(settings, site, "woven", lambda _: most, rank=rank, transport=transport)
        for planned in first_step(settings, planner, 32):
            yield replace(planned.round, index=1), planned.schedule

    plans = zip(*(rounds(t, r) for t, r in ((NCCL, None), (ONE_QUEUE, None), (ONE_QUEUE, 0), (ONE_QUEUE, 1))), strict=True)
    changed = 0
    for (round_, free), (_, held), (_, first), (_, second) in plans:
        hangs = bool(simulate(free, round_, site, transport=ONE_QUEUE).stuck)
        assert (free != held) == hangs
        assert faults_of(held, round_, site, ONE_QUEUE) == []
        assert {**first.actions, **second.actions} == held.actions
        changed += hangs
    assert changed


@given(case=cases(), most=st.integers(1, 2))
def test_sends_of_micro_batches_passing_one_by_one_are_never_held_in_a_circle(case: tuple[Round, Site, Costs], most: int) -> None:
    round_, site, costs = case
    transport, computes = replace(ONE_QUEUE, in_flight={Payload.HIDDEN: most}), one_by_one(round_, site, costs)
    assert check(add_communication(computes, round_, site), round_, site, ample_budgets(site), costs, transport) == []
    assert prove(computes, round_, site, transport)


def test_roles_whose_pipelines_run_in_opposite_directions_come_through_or_are_refused_with_what_saves_them() -> None:
    """Prefills in opposite directions over the same two ranks, of more micro-batches than may be on their way."""
    actor, back = RolePlacement((2,)), RolePlacement((1, 0), pp=2)
    site = Site({"actor": actor, "critic": RolePlacement((0, 1), pp=2), "reward": back})
    work = {role: (tuple((Growth(first + j, 0, 4, 4),) for j in range(2)),) for role, first in (("critic", 0), ("reward", 9))}
    lists = GENERATORS["intra"](round_ := Round(1, 0, (), work), site, Costs())
    turned = {rank: sorted(lists.of(rank), key=lambda a, r=rank: (a.role == "critic") == bool(r)) for rank in (0, 1)}
    computes = Schedule({rank: tuple(own) for rank, own in turned.items()})
    require_provable(computes, round_, site, ample_budgets(site), Costs(), NCCL)
    with pytest.raises(ScheduleError, match="over nccl-one-queue") as told:
        require_provable(computes, round_, site, ample_budgets(site), Costs(), ONE_QUEUE)
    assert "(after `send hidden critic m0 c0 -> 1`, which has not been received)" in str(told.value)
    assert "set CUDA_DEVICE_MAX_CONNECTIONS=32, or take overlap.schedule=intra" in str(told.value)
    # The three generators fail where one stage is much slower than the other.
    ranks, back = RolePlacement((0, 1), pp=2), RolePlacement((1, 0), pp=2)
    site = Site({"actor": ranks, "critic": back, "reward": ranks, "reference": back})
    costs = Costs(default_prefill=Linear(1.0, 0.0), prefill={"critic": (Linear(0.1, 0.0), Linear(5.0, 0.0))})
    round_ = make_round(site, steps=2, prefills=8)
    passing = {name: prove(generator(round_, site, costs), round_, site, ONE_QUEUE) for name, generator in GENERATORS.items()}
    assert passing == {"sequential": False, "intra": False, "woven": False}
    assert prove(one_by_one(round_, site, costs), round_, site, ONE_QUEUE)


def test_the_transport_of_a_run_and_streams_that_a_rank_has_work_on() -> None:
    """Streams go on by themselves where no two of them share a queue."""
    assert transport_of("cpu", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 18) is GLOO
    for queues, streams, expected in (
        ("1", 2, ONE_QUEUE), ("8", 8, NCCL), ("8", 9, ONE_QUEUE), ("32", 32, NCCL), ("99", 33, ONE_QUEUE), ("many", 2, ONE_QUEUE),
    ):  # fmt: skip
        assert transport_of("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": queues}, streams) is expected
    for unsaid in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": ""}):
        assert (transport_of("cuda", unsaid, 32), transport_of("cuda", unsaid, 33)) == (NCCL, ONE_QUEUE)
    assert [*TRANSPORTS] == ["gloo", "nccl", "nccl-cold", "nccl-one-queue"]
    assert [each.holds for each in TRANSPORTS.values()] == [False, False, True, True]
    assert ONE_QUEUE.in_flight == {Payload.HIDDEN: 1}
    # Counted by hand for a middle stage: hidden states come and go for each of four roles, and tokens come.
    roles = "actor", "critic", "reward", "reference"
    assert most_streams(Site(dict.fromkeys(roles, RolePlacement((0,))))) == len(roles)
    pipelines = Site(dict.fromkeys(roles, RolePlacement((0, 1, 2, 3), pp=4)))
    shared = {group for group in run_groups(pipelines.placements, {}) if set(group.ranks) == {0, 1, 2, 3}}
    lanes = {group for group in shared if "hidden" in group.label or "tokens" in group.label}
    assert len(lanes) == 5 and most_streams(pipelines) == len(roles) + (4 * 2 + 1) + len(shared - lanes) + 1
    for size in (64, 4096):
        everywhere = RolePlacement(tuple(range(size)), tp=8, pp=8, dp=size // 64)
        assert most_streams(Site(dict.fromkeys(roles, everywhere))) <= 32, "as many as torch and CUDA have"
