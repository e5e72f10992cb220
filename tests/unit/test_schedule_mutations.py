"""1,000 mutated schedules: the checker finds beforehand what really goes wrong when they are run.
`tests.support.schedule_interpreter` decides what is harmful, by running the lists on values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest

from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.rounds import FAN_OUT, Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedule_interpreter import harm
from tests.support.schedules import ample_budgets, build, colocated, disaggregated, make_round, split_scorers

NUM_MUTATIONS = 1000
SITES: dict[str, Callable[[tuple[int, int, int]], Site]] = {
    "colocated": colocated,
    "disaggregated": lambda actor: disaggregated(actor, (1, 1, 1)),
    "disaggregated pipeline": lambda actor: disaggregated(actor, (1, 2, 2)),
    "split scorers": split_scorers,
}
LAYOUTS = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2, 4) for dp in (1, 2)]


def sound_schedule(rng: random.Random) -> tuple[str, Schedule, Round, Site]:
    name, layout = rng.choice(list(SITES)), rng.choice(LAYOUTS)
    site = SITES[name](layout)
    round_ = make_round(
        site,
        steps=rng.choice((0, 1, 2, 3)),
        micro_batches=rng.choice((1, 2)),
        prefills=rng.choice((0, 1, 2)),
        prompts=rng.choice((0, 1, 2)),
    )
    maker = rng.choice(("builder", *GENERATORS))
    if maker == "builder":
        return f"builder, {name} {layout}", build(round_, site, rng), round_, site
    schedule = add_communication(GENERATORS[maker](round_, site, Costs()), round_, site)
    return f"{maker}, {name} {layout}", schedule, round_, site


def mutate(schedule: Schedule, rng: random.Random) -> tuple[str, Schedule]:
    """An action dropped, doubled, or swapped with another of its rank (a neighbour, half of the time)."""
    lists = {rank: list(own) for rank, own in schedule.actions.items()}
    rank = rng.choice([r for r, own in lists.items() if own])
    own, kind = lists[rank], rng.choice(("drop", "double", "swap"))
    at = rng.randrange(len(own))
    if kind == "drop":
        del own[at]
    elif kind == "double":
        own.insert(rng.randrange(at, len(own)) + 1, own[at])
    else:
        other = min(at + 1, len(own) - 1) if rng.random() < 0.5 else rng.randrange(len(own))
        own[at], own[other] = own[other], own[at]
    return kind, Schedule({r: tuple(actions) for r, actions in lists.items()})


def test_every_harmful_mutation_is_found(record_property: Callable[[str, object], None]) -> None:
    rng = random.Random(20)
    counts: Counter[str] = Counter()
    missed = []
    done = passed_on = 0
    while done < NUM_MUTATIONS:
        fan_out = rng.choice((1, 2, FAN_OUT))
        with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", fan_out):
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
            done += 1
            counts["harmful" if trouble else "harmless"] += 1
            counts[f"{kind}: harmful" if trouble else f"{kind}: harmless"] += 1
            counts["found" if trouble and faults else "accepted" if not trouble and not faults else "other"] += 1
            if trouble and not faults:
                missed.append(f"{name}, {kind}: {trouble}")
    print(dict(counts))
    for key, value in counts.items():
        record_property(key, value)
    assert not missed, "\n".join(missed)
    assert counts["harmful"] > NUM_MUTATIONS / 2 and counts["harmless"] > NUM_MUTATIONS / 50
    assert counts["accepted"] > counts["harmless"] / 3, counts
    assert passed_on > 5, "listeners that pass chunks on are among them"


def test_independent_work_may_change_places() -> None:
    site = disaggregated((1, 1, 1), (1, 1, 1))
    round_ = make_round(site, prompts=0)
    schedule = build(round_, site)
    own = schedule.of(1)
    blocks = [own[i : i + 2] for i in range(0, 12, 2)]  # prefill and score, two micro-batches of three roles
    by_role = sorted(blocks, key=lambda block: block[0].role)
    turned = Schedule({0: schedule.of(0), 1: (*(action for block in by_role for action in block), *own[12:])})
    assert turned != schedule
    assert harm(turned, round_, site) is None
    assert check(turned, round_, site, ample_budgets(site)) == []


@pytest.mark.parametrize("name", SITES)
def test_interpreter_sees_a_message_in_the_place_of_another(name: str) -> None:
    """The judge itself: two decode micro-steps that change places on the receiving stage give other values."""
    site = SITES[name]((1, 2, 1))
    round_ = make_round(site, prompts=0)
    schedule = build(round_, site)
    assert harm(schedule, round_, site) is None

    def renamed(action: Action) -> Action:
        turned = Action(action.rank, action.op, action.role, 1 - action.micro_batch, action.chunk, action.step)
        return turned if action.peer is None and action.op.value in ("decode", "sample") else action

    lists = dict(schedule.actions) | {1: tuple(renamed(action) for action in schedule.of(1))}
    assert harm(Schedule(lists), round_, site) is not None
