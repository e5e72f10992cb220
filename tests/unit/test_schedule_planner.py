"""Plans that ranks make for themselves fit together, round after round."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import ChunkRow, merge_rows
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Op, Schedule
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.plan import late_scorers, round_generator
from oppo_megatron.schedule.planning import planner as planner_module
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import PlannedRound, RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.components import component_of
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.cut import Cut, Work, choose_cut
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import colocated, disaggregated, make_site, split_scorers

MAX_RESPONSE, MAX_PROMPT, CHUNK = 12, 6, 5
BUDGET = MAX_RESPONSE + MAX_PROMPT
BATCH = 5
SCORERS_TP2 = dict.fromkeys(("reference", "critic", "reward"), (0, 2, 1, 1))
REWARD_TP2 = {"critic": (0, 1, 2, 1), "reference": (1, 1, 2, 1), "reward": (1, 2, 1, 1)}
BOTH_WAYS = {"actor": (0, 1), "critic": (2, 1), "reward": (1, 2)}
SITES: dict[str, Site] = {
    "one rank": colocated((1, 1, 1)), "colocated PP2": colocated((1, 2, 1)), "colocated TP2xPP2xDP2": colocated((2, 2, 2)),
    "actor PP2, scorers TP2 on the same ranks": make_site((1, 2, 1), SCORERS_TP2), "PP2 | 1": disaggregated((1, 2, 1), (1, 1, 1)),
    "DP2 | PP2xDP2": disaggregated((1, 1, 2), (1, 2, 2)), "PP2, critic beside it, others apart": split_scorers((1, 2, 1)),
    "DP2, critic beside it, others apart": split_scorers((1, 1, 2)),
}  # fmt: skip
SPREAD: dict[str, Site] = {
    "reward TP2 on a rank of each kind": make_site((1, 2, 1), REWARD_TP2),
    "reward PP2 one way, critic the other": Site({role: RolePlacement(own, 1, 2) for role, own in BOTH_WAYS.items()}),
}
"""Scorers on ranks of the actor and others."""


def new_planner(
    site: Site, generator: str, slots: int | Callable[[int], int] = 9, rank: int | None = None, late: Set[str] | None = None,
    weave: Weave = ("auto", "auto"),
) -> RoundPlanner:  # fmt: skip
    """`slots` of each replica, or a function of their number."""
    slots_of = slots if callable(slots) else lambda _: slots
    replicas = {role: placement.dp for role, placement in site.placements.items()}
    scorers = {role: ScoringBook(role, dp, slots_of(dp)) for role, dp in replicas.items() if role != "actor"}
    actor = ActorBook(replicas["actor"], slots_of(replicas["actor"]), lambda _: MAX_RESPONSE)
    late = late_scorers(site) if late is None else late
    return RoundPlanner(site, generator, weave, BUDGET, BUDGET, actor, scorers, rank=rank, late=late)


def filled(count: int, tokens: int = 6, first: int = 0) -> RolloutBuffer:
    buffer = RolloutBuffer(count, 0, 1)
    buffer.admit(Prompt(i, i, "", (1,) * tokens) for i in range(first, first + count))
    return buffer


Weave = Sequence[int | Literal["auto"]]
Visit = Callable[[list[PlannedRound]], None]


@dataclass
class Run:
    planners: Sequence[RoundPlanner]
    rng: random.Random
    buffer: RolloutBuffer = field(default_factory=lambda: RolloutBuffer(BATCH, 2, 2))
    lengths: dict[int, int] = field(default_factory=dict)
    index: int = 0
    chunk: int = CHUNK

    def steps(self, count: int, visit: Visit) -> None:
        """PPO steps with streamed scoring; `visit` sees what each planner plans for every round."""
        for _ in range(count):
            self._admit()
            while not self.buffer.readiness().ready:
                if self.buffer.backfill:
                    self._admit()
                self._round(visit, self.buffer.active, self.buffer.rollouts)
            batch = self.buffer.take_batch()
            while any(book.owes(batch) for book in self.planners[0].scorers.values()):
                self._round(visit, [], batch)
            self._end_step(batch)

    def _round(self, visit: Visit, active: Sequence[Rollout], score: Sequence[Rollout]) -> None:
        """Each planner orders open sequences in its own way, as a rank without the caches has none to go by."""
        self.index += 1
        plans = []
        for planner in self.planners:
            order = self.rng.sample(range(len(self.lengths)), len(self.lengths))
            plans.append(planner.plan(self.index, active, score, self.chunk, lambda ids, o=order: sorted(ids, key=o.index)))
        visit(plans)
        if active:
            self._decode(plans[0], active)

    def _admit(self) -> None:
        prompts = []
        for _ in range(self.buffer.room):
            seq_id = len(self.lengths)
            self.lengths[seq_id] = self.rng.randint(1, MAX_RESPONSE)
            prompts.append(Prompt(seq_id, seq_id, "", (1,) * self.rng.randint(1, MAX_PROMPT)))
        self.buffer.admit(prompts)

    def _decode(self, planned: PlannedRound, active: Sequence[Rollout]) -> None:
        held, rows = {r.seq_id: r for r in active}, []
        for growth in (g for work in planned.works["actor"] for batch in work.decode for g in batch):
            known = len(held[growth.seq_id].tokens)
            left = self.lengths[growth.seq_id] - known
            new = min(left, growth.new)
            row = ChunkRow(growth.seq_id, known, [0] * new, [0.0] * new, [0.0] * new, 0)
            if new == left:
                row.finish_clock, row.finish_reason = self.buffer.clock + new, "eos"
            rows.append(row)
        self.buffer.record(merge_rows(self.index, self.buffer.clock, rows, self.buffer.readiness()))
        for planner in self.planners:
            planner.actor.record(active)

    def _end_step(self, batch: Sequence[Rollout]) -> None:
        for planner in self.planners:
            for book in planner.scorers.values():
                for own in batch:
                    book.forget(own.seq_id)
            planner.scorers["critic"].reset()
            planner.actor.invalidate()


NAMES, SEEDS = st.sampled_from([*SITES, *SPREAD]), st.integers(0, 10**6)


@settings(max_examples=25)
@given(NAMES, st.sampled_from(list(GENERATORS)), st.integers(4, 9), st.sampled_from(["auto", 1, 2, 3]), SEEDS)
def test_what_ranks_plan_for_themselves_is_sound_together(name: str, generator: str, slots: int, batches: Any, seed: int) -> None:
    """Each plans only its own part.  The memo of schedules has its share in it: rounds of one shape get one schedule."""
    site = (SITES | SPREAD)[name]
    ranks, budgets = site.ranks, {role: [KVBudget(slots, BUDGET)] * own.dp for role, own in site.placements.items()}
    planners = [new_planner(site, generator, slots, rank, weave=(batches, "auto")) for rank in (None, *ranks)]

    def visit(plans: list[PlannedRound]) -> None:
        own_lists = {rank: plan.schedule.of(rank) for rank, plan in zip(ranks, plans[1:], strict=True)}
        for rank, plan in zip(ranks, plans[1:], strict=True):
            part = component_of(site, rank).part
            assert shape(part(plan.round)) == shape(part(plans[0].round))
        assert check(Schedule(own_lists), replace(plans[0].round, index=1), site, budgets) == []

    Run(planners, random.Random(seed)).steps(3, visit)


def test_who_scores_last() -> None:
    """Roles on the actor's ranks alone, where others lie elsewhere and the actor's pipeline has no bubbles for them."""
    beside = make_site((1, 1, 1), {"reference": (0, 1, 1, 1), "critic": (1, 1, 1, 1), "reward": (1, 1, 1, 1)})
    replicas = make_site((1, 1, 2), {"reference": (1, 1, 1, 1), "critic": (0, 1, 1, 3)})
    assert late_scorers(beside) == {"reference"} == late_scorers(replicas)
    assert late_scorers(SITES["DP2, critic beside it, others apart"]) == {"critic"}
    for name in ("one rank", "colocated PP2", "PP2 | 1", "PP2, critic beside it, others apart", "DP2 | PP2xDP2"):
        assert late_scorers(SITES[name]) == set(), name


@pytest.mark.parametrize("late", [True, False])
def test_a_late_scorer_reads_complete_batches_only(late: bool) -> None:
    site = SITES["DP2, critic beside it, others apart"]
    run = Run([new_planner(site, "intra", late=None if late else set())], random.Random(3))
    tokens: dict[bool, list[int]] = {True: [], False: []}

    def visit(plans: list[PlannedRound]) -> None:
        decodes = "actor" in plans[0].works
        tokens[decodes] += [g.new for w in plans[0].works["critic"] for batch in w.prefill for g in batch]
        others = [g for w in plans[0].works["reward"] for batch in w.prefill for g in batch]
        assert others or not decodes, "the other scorers read along"

    run.steps(4, visit)
    assert bool(tokens[True]) == (not late)
    assert len(tokens[False]) == 4 * BATCH if late else len(tokens[False]) < 4 * BATCH


@settings(max_examples=40)
@given(name=NAMES, delta=st.integers(0, BATCH), seed=SEEDS)
def test_backfill_needs_no_more_slots_than_are_decoded(name: str, delta: int, seed: int) -> None:
    """A share of B + delta slots: all that may decode does, and no scorer reads a token twice but the critic's anew."""
    decoded = BATCH + delta
    planner = new_planner((SITES | SPREAD)[name], "intra", lambda replicas: ceil(decoded / replicas))
    run = Run([planner], random.Random(seed), RolloutBuffer(BATCH, delta, 2, backfill=True))

    def visit(plans: list[PlannedRound]) -> None:
        works = plans[0].works
        assert not any(work.evict for replicas in works.values() for work in replicas)
        if "actor" in works:
            running = sum(len(batch) for work in works["actor"] for batch in work.decode)
            assert running == len(run.buffer.active) <= decoded

    run.steps(6, visit)


@pytest.mark.parametrize("name", [*SITES, *SPREAD])
def test_woven_is_chosen_where_a_rank_decodes_and_scores(name: str) -> None:
    site = (SITES | SPREAD)[name]
    assert round_generator(OverlapConfig(), site) == ("intra" if "|" in name else "woven")
    assert round_generator(OverlapConfig(intra=False), site) == "sequential"
    assert round_generator(OverlapConfig(schedule="intra"), site) == "intra"


def test_a_cut_is_chosen_once_and_a_schedule_made_anew_when_costs_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Costs] = []

    def cut(work: Work, costs: Costs, budget: int, **rest: Any) -> Cut:
        made.append(costs)
        return choose_cut(work, costs, budget, **rest)

    monkeypatch.setattr(planner_module, "choose_cut", cut)
    planner = new_planner(SITES["colocated PP2"], "woven", 400)
    for number in range(4):
        if number % 2 == 0:
            planner.learn((CHEAP_STARTS, DEAR_STARTS)[number // 2])
        buffer = filled(4, first=4 * number)
        planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list)
    assert made == [CHEAP_STARTS, DEAR_STARTS]
    planner = new_planner(SITES["colocated PP2"], "woven", 16, weave=(1, 36))
    fast, slow = Linear(1e-3, 1e-6), Linear(1.0, 1e-6)
    found = []
    for number, (decode, prefill) in enumerate([(slow, fast), (fast, slow), (slow, fast)]):
        planner.learn(Costs(decode, default_prefill=prefill))
        buffer = filled(4, first=number * 4)
        found.append(planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list).schedule)
    woven, after, again = found
    assert sorted(map(str, woven)) == sorted(map(str, after)) and woven == again != after


def shape(round_: Round) -> Any:
    prefill = {role: tuple(map(len, replicas)) for role, replicas in round_.prefill.items()}
    return round_.steps, tuple(map(len, round_.decode)), tuple(sorted(prefill.items()))


def cut_of(planned: PlannedRound) -> tuple[int, int]:
    """Decode micro-batches, and prefill micro-batches of the reward model."""
    return len(planned.round.decode[0]), len(planned.round.prefill["reward"][0])


def first_round(site: Site, generator: str, costs: Costs, weave: Weave = ("auto", "auto")) -> PlannedRound:
    planner = new_planner(site, generator, 16, weave=weave)
    planner.costs, planner.micro_batch_tokens, buffer = costs, 200, filled(12)
    return planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list)


CHEAP_STARTS = Costs(decode=Linear(1e-6, 1e-3), default_prefill=Linear(1e-6, 1e-3), message_s=0.0)
DEAR_STARTS = Costs(decode=Linear(1.0, 1e-6), default_prefill=Linear(1.0, 1e-6), message_s=0.0)


def test_auto_cuts_by_the_costs_and_is_one_whole_where_nothing_is_woven() -> None:
    site = SITES["colocated PP2"]
    cheap, dear = (cut_of(first_round(site, "woven", costs)) for costs in (CHEAP_STARTS, DEAR_STARTS))
    assert cheap[0] > 1, "where a micro-batch costs by its tokens, several keep both stages busy"
    assert dear == (1, 1), "where each costs the same, one of everything is fastest"
    for generator, name in ("intra", "colocated PP2"), ("sequential", "colocated PP2"), ("woven", "one rank"):
        assert cut_of(first_round(SITES[name], generator, CHEAP_STARTS)) == (1, 1)


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_cut_that_is_given_is_kept_to_within_the_budget_of_micro_batches(generator: str) -> None:
    settled = first_round(SITES["colocated PP2"], generator, CHEAP_STARTS, weave=(3, 24))
    assert cut_of(settled) == (3, 3)  # twelve prompts of six tokens: four to a micro-batch
    assert all(sum(g.new for g in batch) <= 24 for batch in settled.works["reward"][0].prefill)
    # 200 tokens, whatever is asked for: twelve prompts of 100 tokens come two at a time
    planner, buffer = new_planner(SITES["colocated PP2"], generator, 16, weave=("auto", 10**6)), filled(12, 100)
    planner.micro_batch_tokens, planner.max_length = 200, 120
    assert cut_of(planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list))[1] == 6


def test_a_round_without_decoding_asks_nothing_of_the_actor() -> None:
    planned = new_planner(SITES["colocated PP2"], "woven").plan(1, [], filled(4, 2).rollouts, CHUNK, list)
    assert "actor" not in planned.works and not planned.round.decodes
    assert {action.op for action in planned.schedule} <= {Op.PREFILL, Op.SCORE, Op.SEND, Op.RECV}
