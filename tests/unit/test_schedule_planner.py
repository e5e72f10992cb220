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

SITES: dict[str, Site] = {
    "one rank": colocated((1, 1, 1)),
    "colocated PP2": colocated((1, 2, 1)),
    "colocated TP2xPP2xDP2": colocated((2, 2, 2)),
    "actor PP2, scorers TP2 on the same ranks": make_site(
        (1, 2, 1), {role: (0, 2, 1, 1) for role in ("reference", "critic", "reward")}
    ),
    "PP2 | 1": disaggregated((1, 2, 1), (1, 1, 1)),
    "DP2 | PP2xDP2": disaggregated((1, 1, 2), (1, 2, 2)),
    "PP2, critic beside it, others apart": split_scorers((1, 2, 1)),
    "DP2, critic beside it, others apart": split_scorers((1, 1, 2)),
}

SPREAD: dict[str, Site] = {
    "reward TP2 on a rank of each kind": make_site(
        (1, 2, 1), {"critic": (0, 1, 2, 1), "reference": (1, 1, 2, 1), "reward": (1, 2, 1, 1)}
    ),
    "reward PP2 one way, critic the other": Site(
        {"actor": RolePlacement((0, 1), 1, 2), "critic": RolePlacement((2, 1), 1, 2), "reward": RolePlacement((1, 2), 1, 2)}
    ),
}
"""Scorers on ranks of the actor and others."""


def new_planner(
    site: Site,
    generator: str,
    slots: int = 9,
    rank: int | None = None,
    late: Set[str] | None = None,
    weave: Sequence[int | Literal["auto"]] = ("auto", "auto"),
) -> RoundPlanner:
    placements = site.placements
    return RoundPlanner(
        site,
        generator,
        weave,
        BUDGET,
        BUDGET,
        ActorBook(placements["actor"].dp, slots, lambda _: MAX_RESPONSE),
        {name: ScoringBook(name, placement.dp, slots) for name, placement in placements.items() if name != "actor"},
        rank=rank,
        late=late_scorers(site) if late is None else late,
    )


Visit = Callable[[list[PlannedRound]], None]


@dataclass
class Run:
    """A run without models: a buffer, and planners that all learn what happens."""

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
        chunk = merge_rows(self.index, self.buffer.clock, rows, self.buffer.readiness())
        self.buffer.record(chunk)
        for planner in self.planners:
            planner.actor.record(active)

    def _end_step(self, batch: Sequence[Rollout]) -> None:
        for planner in self.planners:
            for book in planner.scorers.values():
                for own in batch:
                    book.forget(own.seq_id)
            planner.scorers["critic"].reset()
            planner.actor.invalidate()


def ranks_of(site: Site) -> list[int]:
    return sorted({rank for placement in site.placements.values() for rank in placement.ranks})


def budgets_of(site: Site, slots: int) -> dict[str, list[KVBudget]]:
    return {name: [KVBudget(slots, BUDGET)] * placement.dp for name, placement in site.placements.items()}


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from([*SITES, *SPREAD]),
    generator=st.sampled_from(list(GENERATORS)),
    slots=st.integers(4, 9),
    micro_batches=st.sampled_from(["auto", 1, 2, 3]),
    seed=st.integers(0, 10**6),
)
def test_what_all_ranks_plan_for_themselves_is_sound_together(
    name: str, generator: str, slots: int, micro_batches: Any, seed: int
) -> None:
    """Each plans only its own part.  The memo of schedules has its share in it: rounds of one shape get one schedule."""
    site = (SITES | SPREAD)[name]
    ranks = ranks_of(site)
    planners = [new_planner(site, generator, slots, rank, weave=(micro_batches, "auto")) for rank in (None, *ranks)]

    def visit(plans: list[PlannedRound]) -> None:
        own_lists = {rank: plan.schedule.of(rank) for rank, plan in zip(ranks, plans[1:], strict=True)}
        for rank, plan in zip(ranks, plans[1:], strict=True):
            part = component_of(site, rank).part
            assert shape(part(plan.round)) == shape(part(plans[0].round))
        assert check(Schedule(own_lists), replace(plans[0].round, index=1), site, budgets_of(site, slots)) == []

    Run(planners, random.Random(seed)).steps(3, visit)


def test_who_scores_last() -> None:
    """Roles on the actor's ranks alone, where others lie elsewhere and the actor's pipeline has no bubbles for them."""
    beside = Site(
        {
            "actor": RolePlacement((0,)),
            "reference": RolePlacement((0,)),
            "critic": RolePlacement((1,)),
            "reward": RolePlacement((1,)),
        }
    )
    replicas = Site(
        {"actor": RolePlacement((0, 1), dp=2), "reference": RolePlacement((1,)), "critic": RolePlacement((0, 1, 2), dp=3)}
    )
    assert late_scorers(beside) == {"reference"} == late_scorers(replicas)
    assert late_scorers(SITES["DP2, critic beside it, others apart"]) == {"critic"}
    for name in ("one rank", "colocated PP2", "PP2 | 1", "PP2, critic beside it, others apart", "DP2 | PP2xDP2"):
        assert late_scorers(SITES[name]) == set(), name


@pytest.mark.parametrize("late", [True, False])
def test_a_late_scorer_reads_complete_batches_only(late: bool) -> None:
    """Reads each token once; it never reads rollouts that are carried."""
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


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from([*SITES, *SPREAD]), delta=st.integers(0, BATCH), seed=st.integers(0, 10**6))
def test_backfill_needs_no_more_slots_than_are_decoded(name: str, delta: int, seed: int) -> None:
    """A share of B + delta slots: all that may decode does, and no scorer reads a token twice but the critic's anew."""
    site, decoded = (SITES | SPREAD)[name], BATCH + delta
    planner = new_planner(site, "intra")
    placements = site.placements
    planner.actor = ActorBook(placements["actor"].dp, ceil(decoded / placements["actor"].dp), lambda _: MAX_RESPONSE)
    planner.scorers = {
        role: ScoringBook(role, placement.dp, ceil(decoded / placement.dp))
        for role, placement in placements.items()
        if role != "actor"
    }
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


def test_a_schedule_is_made_anew_when_costs_are_learned() -> None:
    planner = new_planner(SITES["colocated PP2"], "woven", 16, weave=(1, 36))
    fast, slow = Linear(1e-3, 1e-6), Linear(1.0, 1e-6)
    found = []
    for number, (decode, prefill) in enumerate([(slow, fast), (fast, slow), (slow, fast)]):
        planner.learn(Costs(decode, default_prefill=prefill))
        buffer = RolloutBuffer(4, 0, 1)
        buffer.admit(Prompt(number * 4 + i, number * 4 + i, "", (1,) * 6) for i in range(4))
        found.append(planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list).schedule)
    woven, after, again = found
    assert sorted(map(str, woven)) == sorted(map(str, after)) and woven == again != after


def test_a_cut_is_chosen_once_for_rounds_of_a_size_until_costs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Costs] = []

    def cut(work: Work, costs: Costs, budget: int, **rest: Any) -> Cut:
        made.append(costs)
        return choose_cut(work, costs, budget, **rest)

    monkeypatch.setattr(planner_module, "choose_cut", cut)
    planner = new_planner(SITES["colocated PP2"], "woven", 400)
    for number in range(4):
        if number % 2 == 0:
            planner.learn((CHEAP_STARTS, DEAR_STARTS)[number // 2])
        buffer = RolloutBuffer(4, 0, 1)
        buffer.admit(Prompt(4 * number + i, 0, "", (1,) * 6) for i in range(4))
        planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list)
    assert made == [CHEAP_STARTS, DEAR_STARTS]


def shape(round_: Round) -> Any:
    prefill = {role: tuple(map(len, replicas)) for role, replicas in round_.prefill.items()}
    return round_.steps, tuple(map(len, round_.decode)), tuple(sorted(prefill.items()))


def cut_of(planned: PlannedRound) -> tuple[int, int]:
    """Decode micro-batches, and prefill micro-batches of the reward model."""
    return len(planned.round.decode[0]), len(planned.round.prefill["reward"][0])


def first_round(
    site: Site, generator: str, costs: Costs, weave: Sequence[int | Literal["auto"]] = ("auto", "auto")
) -> PlannedRound:
    planner = new_planner(site, generator, 16, weave=weave)
    planner.costs, planner.micro_batch_tokens = costs, 200
    buffer = RolloutBuffer(12, 0, 1)
    buffer.admit(Prompt(i, i, "", (1,) * 6) for i in range(12))
    return planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list)


CHEAP_STARTS = Costs(decode=Linear(1e-6, 1e-3), default_prefill=Linear(1e-6, 1e-3), message_s=0.0)
DEAR_STARTS = Costs(decode=Linear(1.0, 1e-6), default_prefill=Linear(1.0, 1e-6), message_s=0.0)


def test_auto_cuts_by_the_costs() -> None:
    site = SITES["colocated PP2"]
    cheap, dear = (cut_of(first_round(site, "woven", costs)) for costs in (CHEAP_STARTS, DEAR_STARTS))
    assert cheap[0] > 1, "where a micro-batch costs by its tokens, several keep both stages busy"
    assert dear == (1, 1), "where each costs the same, one of everything is fastest"


@pytest.mark.parametrize(
    ("generator", "site"), [("intra", "colocated PP2"), ("sequential", "colocated PP2"), ("woven", "one rank")]
)
def test_auto_is_one_whole_where_nothing_is_woven(generator: str, site: str) -> None:
    assert cut_of(first_round(SITES[site], generator, CHEAP_STARTS)) == (1, 1)


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_cut_that_is_given_is_kept_to(generator: str) -> None:
    settled = first_round(SITES["colocated PP2"], generator, CHEAP_STARTS, weave=(3, 24))
    assert cut_of(settled) == (3, 3)  # twelve prompts of six tokens: four to a micro-batch
    assert all(sum(g.new for g in batch) <= 24 for batch in settled.works["reward"][0].prefill)


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_cut_that_is_given_keeps_to_the_budget_of_micro_batches(generator: str) -> None:
    """200 tokens, whatever is asked for: twelve prompts of 100 tokens come two at a time."""
    planner = new_planner(SITES["colocated PP2"], generator, 16, weave=("auto", 10**6))
    planner.micro_batch_tokens, planner.max_length = 200, 120
    buffer = RolloutBuffer(12, 0, 1)
    buffer.admit(Prompt(i, i, "", (1,) * 100) for i in range(12))
    assert cut_of(planner.plan(1, buffer.active, buffer.rollouts, CHUNK, list))[1] == 6


def test_a_round_without_decoding_asks_nothing_of_the_actor() -> None:
    planner = new_planner(SITES["colocated PP2"], "woven")
    buffer = RolloutBuffer(4, 0, 1)
    score = buffer.admit(Prompt(i, i, "", (1, 2)) for i in range(4))
    planned = planner.plan(1, [], score, CHUNK, list)
    assert "actor" not in planned.works and not planned.round.decodes
    assert {action.op for action in planned.schedule} <= {Op.PREFILL, Op.SCORE, Op.SEND, Op.RECV}
