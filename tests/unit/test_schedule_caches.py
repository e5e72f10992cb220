"""Sizes of a round are checked for each round, as the checker of whole schedules sees them."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest

from oppo_megatron.errors import ScheduleError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt
from oppo_megatron.schedule.checking.caches import require_room
from oppo_megatron.schedule.checking.checker import FaultKind, check
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Growth, KVBudget, Round, Site
from oppo_megatron.schedule.weaving import generators
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import build, make_site
from tests.unit.test_schedule_planner import SITES, Run, new_planner, shape


def sized(rng: random.Random) -> tuple[Round, Site, dict[str, list[KVBudget]]]:
    """A round whose micro-batches mostly continue each other, and caches that mostly hold it."""
    site = rng.choice([make_site((1, 1, 2), {"reward": (0, 1, 1, 2)}), make_site((1, 2, 1), {"reward": (2, 1, 1, 1)})])
    steps = rng.randint(1, 4)

    def prefill(first: int) -> tuple[tuple[Growth, ...], ...]:
        lengths, batches = [rng.randint(0, 3) for _ in range(3)], []
        for _ in range(rng.randint(1, 2)):  # `build` has decoding wait for as many as it has micro-batches
            news = [rng.randint(1, 3) for _ in lengths]
            slip = int(rng.random() < 0.1)
            batches.append(tuple(Growth(first + i, lengths[i] + slip, new) for i, new in enumerate(news)))
            lengths = [g.past + g.new for g in batches[-1]]
        return tuple(batches)

    dp = site.placements["actor"].dp
    stale = [prefill(10) for _ in range(dp)]
    decode = []
    for own in stale:
        cached = {g.seq_id: g.past + g.new for batch in own for g in batch}
        decode.append((tuple(Growth(i, past, rng.randint(1, 5)) for i, past in cached.items()), (Growth(20, 4, 2),)))
    round_ = Round(2, steps, tuple(decode), {"actor": tuple(stale), "reward": tuple(prefill(0) for _ in range(dp))})

    def budget() -> KVBudget:
        return KVBudget(rng.randint(4, 6), rng.randint(9, 20), rng.randint(0, 2))

    return round_, site, {role: [budget() for _ in range(dp)] for role in site.placements}


def overrun(round_: Round, role: str, replica: int, budget: KVBudget) -> bool:
    """Replay the growths of one cache token by token."""
    held: dict[int, int] = {}
    for batch in (*round_.prefill[role][replica], *(round_.decode[replica] if role == "actor" else ())):
        for growth in batch:
            if held.setdefault(growth.seq_id, growth.past) != growth.past:
                return True
            held[growth.seq_id] += min(growth.new, round_.steps) if batch in round_.decode[replica] else growth.new
    return budget.others + len(held) > budget.slots or max(held.values()) > budget.max_length


def test_rounds_are_refused_exactly_if_a_replay_overruns_a_cache() -> None:
    refused = 0
    for seed in range(300):
        round_, site, budgets = sized(random.Random(seed))
        bad = {
            f"the cache of {role} replica {d} "
            for role, own in budgets.items()
            for d, budget in enumerate(own)
            if overrun(round_, role, d, budget)
        }
        faults = check(build(round_, site), round_, site, budgets)
        assert {fault.kind for fault in faults} <= {FaultKind.KV} and len(faults) == len(bad)
        assert all(any(fault.message.startswith(cache) for fault in faults) for cache in bad)
        by_number = {role: dict(enumerate(own)) for role, own in budgets.items()}
        if not bad:
            require_room(round_, by_number)
            continue
        refused += 1
        with pytest.raises(ScheduleError, match="cannot take round 2") as error:
            require_room(round_, by_number)
        assert all(cache in str(error.value) for cache in bad)
    assert 50 < refused < 250


def test_the_first_that_is_not_continued_is_named() -> None:
    batches = (Growth(2, 0, 4), Growth(9, 0, 4), Growth(5, 0, 4)), (Growth(5, 4, 1), Growth(9, 3, 1), Growth(2, 3, 1))
    with pytest.raises(ScheduleError, match="reward replica 0 holds 4 tokens of sequence 9, which is to be continued at 3"):
        require_room(Round(1, 0, (), {"reward": (batches,)}), {"reward": {0: KVBudget(9, 9)}})


def test_every_round_is_checked_and_not_only_the_first_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs alike.  Caches of the second are as long as all rounds need but one, whose shape has been checked before."""
    made, generate = [], GENERATORS["intra"]
    monkeypatch.setattr(generators, "GENERATORS", {"intra": lambda *args: made.append(args) or generate(*args)})
    seen: list[PlannedRound] = []
    Run([new_planner(SITES["PP2 | 1"], "intra")], random.Random(2)).steps(6, lambda plans: seen.extend(plans))
    lengths, shapes = [longest(plan) for plan in seen], [shape(plan.round) for plan in seen]
    at = next(i for i in range(1, len(seen)) if lengths[i] > max(lengths[:i]) and shapes[i] in shapes[:i])

    made.clear()
    planner = new_planner(SITES["PP2 | 1"], "intra")
    planner.max_length = max(lengths[:at])
    with pytest.raises(ScheduleError, match=f"cannot take round {at + 1}:\n.* one grows to {lengths[at]}"):
        Run([planner], random.Random(2)).steps(6, lambda _: None)
    assert len(made) == len(set(shapes[:at])), "no schedule was made for that round, nor checked"


def test_sequences_that_keep_their_slots_are_counted() -> None:
    """A cache has to hold all other open sequences, too; these are too small for all at once."""
    changed = set()

    def visit(plans: list[PlannedRound]) -> None:
        for role, works in plans[0].works.items():
            for work in works:
                growing = {growth.seq_id for batch in (*work.prefill, *work.decode) for growth in batch}
                assert work.num_staying == len(growing - set(work.done))
                changed.update((role, name) for name in ("evict", "open", "prefill", "done") if getattr(work, name))

    Run([new_planner(SITES["DP2 | PP2xDP2"], "intra", 2)], random.Random(4)).steps(6, visit)
    assert {("actor", "prefill"), ("reference", "evict"), ("reward", "done"), ("critic", "done")} <= changed


def test_no_garbage_is_collected_while_a_round_is_planned() -> None:
    seen = []

    def order(seq_ids: Sequence[int]) -> list[int]:
        seen.append(gc.isenabled())
        return list(seq_ids)

    planner, buffer = new_planner(SITES["colocated PP2"], "woven"), RolloutBuffer(4, 0, 1)
    buffer.admit(Prompt(i, i, "", (1,) * 3) for i in range(4))
    planner.plan(1, buffer.active, [], 2, order)
    assert seen == [False] and gc.isenabled()
    planner.max_length = 1
    with pytest.raises(ScheduleError):
        planner.plan(2, buffer.active, [], 2, order)
    assert seen == [False, False] and gc.isenabled()


def longest(plan: PlannedRound) -> int:
    batches = [batch for works in plan.works.values() for work in works for batch in (*work.prefill, *work.decode)]
    return max(growth.past + growth.new for batch in batches for growth in batch)
