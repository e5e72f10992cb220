"""A rank's plan of its component's model is that of all ranks; a fault in one shows in the other, and mutated lists are found."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.checking.checker import FaultKind, check
from oppo_megatron.schedule.checking.proof import prove, require_provable
from oppo_megatron.schedule.links import GLOO, ONE_QUEUE, TRANSPORTS, Transport
from oppo_megatron.schedule.planning import planner as planner_module
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import FAN_OUT, Growth, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication, component_of
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS, intra
from tests.support.schedule_interpreter import harm
from tests.support.schedules import LAYOUTS, ample_budgets, build, colocated, disaggregated, make_round, make_site, split_scorers
from tests.unit.test_schedule_planner import Run, filled, new_planner

NUM_MUTATIONS = 1000
KINDS: dict[str, Callable[[tuple[int, int, int]], Site]] = {
    "colocated": colocated, "disaggregated": lambda actor: disaggregated(actor, (1, 1, 1)),
    "disaggregated pipeline": lambda actor: disaggregated(actor, (1, 2, 2)), "split scorers": split_scorers,
}  # fmt: skip


def sound_schedule(rng: random.Random) -> tuple[str, Schedule, Round, Site]:
    name, layout = rng.choice(list(KINDS)), rng.choice(LAYOUTS)
    site = KINDS[name](layout)
    # steps, micro-batches, prefills and prompts
    round_ = make_round(site, *(rng.choice(counts) for counts in ((0, 1, 2, 3), (1, 2), (0, 1, 2), (0, 1, 2))))
    maker = rng.choice(("builder", *GENERATORS))
    if maker == "builder":
        return f"builder, {name} {layout}", build(round_, site, rng), round_, site
    schedule = add_communication(GENERATORS[maker](round_, site, Costs()), round_, site)
    return f"{maker}, {name} {layout}", schedule, round_, site


def mutate(schedule: Schedule, rng: random.Random) -> tuple[str, Schedule]:
    """An action dropped, doubled, or swapped with another of its rank (a neighbour, half of the time)."""
    lists = {rank: list(own) for rank, own in schedule.actions.items()}
    own, kind = lists[rng.choice([r for r, own in lists.items() if own])], rng.choice(("drop", "double", "swap"))
    at = rng.randrange(len(own))
    if kind == "drop":
        del own[at]
    elif kind == "double":
        own.insert(rng.randrange(at, len(own)) + 1, own[at])
    else:
        other = min(at + 1, len(own) - 1) if rng.random() < 0.5 else rng.randrange(len(own))
        own[at], own[other] = own[other], own[at]
    return kind, Schedule({r: tuple(actions) for r, actions in lists.items()})


def test_every_harmful_mutation_is_found() -> None:
    """The checker finds beforehand what goes wrong when `tests.support.schedule_interpreter` runs the lists on values."""
    rng, counts, missed, passed_on = random.Random(20), Counter[str](), [], 0
    while counts["harmful"] + counts["harmless"] < NUM_MUTATIONS:
        with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", rng.choice((1, 2, FAN_OUT))):
            name, schedule, round_, site = sound_schedule(rng)
        passed_on += any(rank in site.listeners for rank in site.feeds)
        budgets = ample_budgets(site)
        if not any(True for _ in schedule):
            continue
        assert harm(schedule, round_, site) is None, name
        assert check(schedule, round_, site, budgets) == [], name
        for _ in range(10):
            kind, mutated = mutate(schedule, rng)
            if mutated == schedule:
                continue
            trouble, faults = harm(mutated, round_, site), check(mutated, round_, site, budgets)
            counts["harmful" if trouble else "harmless"] += 1
            counts["accepted"] += not trouble and not faults
            if trouble and not faults:
                missed.append(f"{name}, {kind}: {trouble}")
    assert not missed, "\n".join(missed)
    assert counts["harmful"] > NUM_MUTATIONS / 2 and counts["harmless"] > NUM_MUTATIONS / 50
    assert counts["accepted"] > counts["harmless"] / 3, counts
    assert passed_on > 5, "listeners that pass chunks on are among them"


@pytest.mark.parametrize("name", KINDS)
def test_interpreter_sees_a_message_in_the_place_of_another(name: str) -> None:
    """The judge itself: two decode micro-steps that change places on the receiving stage give other values."""
    site = KINDS[name]((1, 2, 1))
    round_ = make_round(site, prompts=0)
    schedule = build(round_, site)
    assert harm(schedule, round_, site) is None

    def renamed(action: Action) -> Action:
        turned = Action(action.rank, action.op, action.role, 1 - action.micro_batch, action.chunk, action.step)
        return turned if action.peer is None and action.op.value in ("decode", "sample") else action

    lists = dict(schedule.actions) | {1: tuple(renamed(action) for action in schedule.of(1))}
    assert harm(Schedule(lists), round_, site) is not None


RANKS = 12
UP_TO_12 = [(t, p, d) for t in (1, 2, 3, 4) for p in (1, 2, 4) for d in (1, 2, 3) if t * p * d <= RANKS]


@st.composite
def sites(draw: st.DrawFn) -> Site:
    def placement() -> RolePlacement:
        tp, pp, dp = draw(st.sampled_from(UP_TO_12))
        return RolePlacement(tuple(draw(st.permutations(range(RANKS)))[: tp * pp * dp]), tp, pp, dp)

    actor = placement()
    roles = ["critic", *draw(st.lists(st.sampled_from(["reference", "reward"]), unique=True))]
    return Site({"actor": actor} | {role: actor if draw(st.booleans()) else placement() for role in roles})


@settings(max_examples=40)
@given(sites(), st.sampled_from(sorted(GENERATORS)), st.integers(2, 7), st.integers(0, 10**6), st.sampled_from([GLOO, ONE_QUEUE]))
def test_every_rank_plans_its_part_of_the_whole(site: Site, generator: str, chunk: int, seed: int, transport: Transport) -> None:
    """Any layout in every round of a run; where the transport holds sends, too, none is refused."""
    ranks = site.ranks
    planners = [new_planner(site, generator, rank=rank, weave=(2, "auto")) for rank in (None, *ranks)]
    for planner in planners:
        planner.transport = transport
    run = Run(planners, random.Random(seed), chunk=chunk)

    def visit(plans: list[PlannedRound]) -> None:
        for rank, plan in zip(ranks, plans[1:], strict=True):
            assert plan.schedule.of(rank) == plans[0].schedule.of(rank), f"rank {rank}"
        for planner in planners:
            planner.learn(planner.costs)

    run.steps(1, visit)


def test_a_plan_of_all_ranks_puts_into_another_order_what_each_rank_does() -> None:
    """Sends of one component would be held in a circle over one hardware queue, those of another not: it alone changes."""
    site, changed = colocated((1, 2, 2)), Counter[int]()
    planners = [new_planner(site, "woven", rank=rank) for rank in (None, None, *site.ranks)]
    for planner in planners[1:]:
        planner.transport = ONE_QUEUE

    def visit(plans: list[PlannedRound]) -> None:
        free, whole, *own = (plan.schedule for plan in plans)
        assert all(plan.of(rank) == whole.of(rank) for rank, plan in zip(site.ranks, own, strict=True))
        changed[sum(whole.of(rank) != free.of(rank) for rank in site.ranks)] += 1
        for planner in planners:
            planner.learn(planner.costs)

    Run(planners, random.Random(0), chunk=5).steps(4, visit)
    assert changed[0] and changed[len(site.ranks) // 2], changed


def test_where_intra_does_not_come_through_either_a_run_goes_on() -> None:
    stages = {"actor": (1, 5), "critic": (3, 0, 2), "reward": (0, 4, 5), "reference": (4, 5)}
    site = Site({role: RolePlacement(ranks, pp=len(ranks)) for role, ranks in stages.items()})

    def visit(plans: list[PlannedRound]) -> None:
        whole, *own = (plan.schedule for plan in plans)
        assert all(plan.of(rank) == whole.of(rank) for rank, plan in zip(site.ranks, own, strict=True))

    def steps() -> None:
        planners = [new_planner(site, "woven", rank=rank) for rank in (None, *site.ranks)]
        for planner in planners:
            planner.transport = ONE_QUEUE
        Run(planners, random.Random(0), chunk=5).steps(2, visit)

    steps()
    with mock.patch.object(planner_module, "one_by_one", intra), pytest.raises(ScheduleError, match="over nccl-one-queue"):
        steps()


def test_lists_that_wait_for_each_other_are_not_proved() -> None:
    """Two scorers whose pipelines run in opposite directions: each rank begins with what it must be sent first."""
    ranks = {"actor": (0, 1), "critic": (2, 1), "reward": (1, 2)}
    site, batch = Site({role: RolePlacement(own, 1, 2) for role, own in ranks.items()}), (Growth(0, 3, 4, 1),)
    round_ = Round(2, 0, (), {"critic": ((batch,),), "reward": ((batch,),)})

    def lists(first: dict[int, str]) -> Schedule:
        made = {}
        for rank, own in first.items():
            roles = sorted(("critic", "reward"), key=lambda role: role != own)
            whole = GENERATORS["intra"](round_, site, Costs()).of(rank)
            made[rank] = tuple(action for role in roles for action in whole if action.role == role)
        return Schedule(made)

    good, bad = lists({1: "reward", 2: "critic"}), lists({1: "critic", 2: "reward"})
    assert prove(good, round_, site) and not prove(bad, round_, site)
    faults = check(add_communication(bad, round_, site), round_, site, ample_budgets(site))
    assert {fault.kind for fault in faults} == {FaultKind.DEADLOCK}


def test_tensor_ranks_are_one_and_replicas_are_left_out() -> None:
    site = colocated((8, 8, 4))
    part = component_of(site, 8 * 8 * 4 - 1)
    assert len(part.model.ranks) == 8 and part.replicas == {role: (3,) for role in site.placements}
    scorers = component_of(disaggregated((8, 8, 4), (8, 2, 3)), 8 * 8 * 4)
    assert scorers.model.placements["reward"].layout == (1, 2, 1)
    assert scorers.model.placements["actor"].ranks == (scorers.site.source,)
    # A scorer on one of two tensor ranks of the actor's first stage: each rank stands for itself.
    for critic in (0, 1, 1, 1), (0, 1, 2, 2):
        assert component_of(make_site((2, 2, 1), {"critic": critic}), 3).model.ranks == (0, 1, 2, 3)


PLANTED = 300
SITES = {
    "colocated": colocated((2, 2, 2)), "colocated, four tensor ranks": colocated((4, 1, 2)),
    "scorers of another layout": make_site((2, 2, 1), {role: (0, 4, 1, 1) for role in ("reference", "critic", "reward")}),
    "disaggregated": disaggregated((2, 2, 2), (2, 1, 2)), "split scorers": split_scorers((2, 2, 2)),
}  # fmt: skip


def test_what_harms_the_whole_is_found_in_the_model() -> None:
    rng, counts, missed = random.Random(11), Counter[str](), []
    while counts.total() < PLANTED:
        name, generator = rng.choice(list(SITES)), rng.choice(sorted(GENERATORS))
        site = SITES[name]
        round_ = make_round(site, steps=rng.choice((0, 2, 5)), prefills=rng.choice((0, 1, 2)), prompts=rng.choice((0, 1)))
        whole = add_communication(GENERATORS[generator](round_, site, Costs()), round_, site)
        part = component_of(site, rng.choice(site.ranks))
        shape = part.part(round_)
        sound = GENERATORS[generator](shape, part.model, Costs())
        if not any(True for _ in sound):
            continue
        assert not refused(sound, shape, part.model)
        for _ in range(10):
            kind, planted = mutate(sound, rng)
            lists = dict(whole.actions)
            for other in map(partial(component_of, site), site.ranks):
                if other.replicas == part.replicas:
                    lists[other.rank] = other.own_list(planted, shape)
            harmful = harm(Schedule(lists), round_, site) is not None
            counts["harmful" if harmful else "harmless"] += 1
            if harmful and not refused(planted, shape, part.model):
                missed.append(f"{name}, {generator}, {kind}")
    assert not missed, missed
    assert counts["harmful"] > PLANTED / 2, counts


def refused(computes: Schedule, shape: Round, site: Site) -> bool:
    try:
        require_provable(computes, shape, site, ample_budgets(site), Costs())
    except ScheduleError:
        return True
    return False


def test_a_cache_too_short_for_the_round_is_told_before_it_runs() -> None:
    planner = new_planner(colocated((2, 2, 2)), "woven", rank=2)
    planner.max_length, buffer = 5, filled(4)
    with pytest.raises(ScheduleError, match="^2 caches cannot take round 1:\n") as told:
        planner.plan(1, buffer.active, buffer.rollouts, 3, list)
    room = "replica 1 has room for 5 tokens per sequence, but one grows to"
    assert f"the cache of actor {room} 8" in str(told.value) and f"the cache of reward {room} 6" in str(told.value)


@settings(max_examples=40)
@given(site=sites(), generator=st.sampled_from(sorted(GENERATORS)), most=st.integers(1, 3), seed=st.integers(0, 10**6))
@example(site=disaggregated((1, 1, 1), (1, 1, 11)), generator="intra", most=3, seed=0)
def test_chunks_that_listeners_pass_on_end_the_lists_of_any_layout(site: Site, generator: str, most: int, seed: int) -> None:
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", most):
        round_ = make_round(site, steps=2, micro_batches=1, prefills=1 + seed % 2, sequences=1)
        whole = add_communication(GENERATORS[generator](round_, site, Costs()), round_, site)
        assert check(whole, round_, site, ample_budgets(site)) == [] and harm(whole, round_, site) is None
        for rank in site.ranks:
            part = component_of(site, rank)
            shape = part.part(round_)
            computes = GENERATORS[generator](shape, part.model, Costs())
            model = add_communication(computes, shape, part.model)
            for transport in TRANSPORTS.values():
                assert transport.holds or check(model, shape, part.model, ample_budgets(part.model), transport=transport) == []
            assert part.own_list(computes, shape) == whole.of(rank)
