"""What each rank plans for itself fits together with what the others plan, round after round."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.overlap import OverlapConfig, WeaveConfig
from oppo_megatron.config.places import Place
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import ChunkRow, Prompt
from oppo_megatron.schedule import planner as planner_module
from oppo_megatron.schedule.actions import Op, Schedule
from oppo_megatron.schedule.books import ActorBook, ScoringBook
from oppo_megatron.schedule.checker import check
from oppo_megatron.schedule.costs import Costs, Linear
from oppo_megatron.schedule.generators import GENERATORS
from oppo_megatron.schedule.merge import merge_rows
from oppo_megatron.schedule.plan import round_generator
from oppo_megatron.schedule.planner import PlannedRound, RoundPlanner
from oppo_megatron.schedule.rounds import KVBudget, Site
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
        {"actor": Place((0, 1), 1, 2), "critic": Place((2, 1), 1, 2), "reward": Place((1, 2), 1, 2)}
    ),
}
"""Scorers on ranks of the actor and others."""


def new_planner(site: Site, generator: str, holds_actor: bool, slots: int = 4, **weave: Any) -> RoundPlanner:
    places = site.places
    return RoundPlanner(
        site,
        generator,
        WeaveConfig(**weave),
        BUDGET,
        BUDGET,
        ActorBook(places["actor"].dp, slots, lambda _: MAX_RESPONSE) if holds_actor else None,
        {name: ScoringBook(name, place.dp, slots) for name, place in places.items() if name != "actor"},
    )


@dataclass
class Run:
    """A run's buffer and the planners of two ranks, one with the actor and one without."""

    actor: RoundPlanner
    listener: RoundPlanner
    rng: random.Random
    buffer: RolloutBuffer = field(default_factory=lambda: RolloutBuffer(BATCH, 2, 2))
    lengths: dict[int, int] = field(default_factory=dict)
    index: int = 0

    def round(self, decode: bool = True) -> tuple[PlannedRound, PlannedRound]:
        """Plan a round on both, then let what was planned happen."""
        buffer, self.index = self.buffer, self.index + 1
        active = buffer.active if decode else []
        score = buffer.rollouts
        order = sorted(self.lengths, key=lambda _: self.rng.random())
        plans = (
            self.actor.plan(self.index, active, score, CHUNK, lambda ids: sorted(ids, key=order.index)),
            self.listener.plan(self.index, active, score, CHUNK, list),
        )
        if active:
            self._decode(plans[0])
        return plans

    def admit(self) -> None:
        prompts = []
        for _ in range(self.buffer.room):
            seq_id = len(self.lengths)
            self.lengths[seq_id] = self.rng.randint(1, MAX_RESPONSE)
            prompts.append(Prompt(seq_id, seq_id, "", (1,) * self.rng.randint(1, MAX_PROMPT)))
        self.buffer.admit(prompts)

    def _decode(self, planned: PlannedRound) -> None:
        active, rows = {r.seq_id: r for r in self.buffer.active}, []
        for growth in (g for work in planned.works["actor"] for batch in work.decode for g in batch):
            own = active[growth.seq_id]
            left = self.lengths[growth.seq_id] - len(own.tokens)
            new = min(left, growth.new)
            row = ChunkRow(growth.seq_id, len(own.tokens), [0] * new, [0.0] * new, [0.0] * new, 0)
            if new == left:
                row.finish_clock, row.finish_reason = self.buffer.clock + new, "eos"
            rows.append(row)
        merged = merge_rows(self.index, self.buffer.clock, rows, self.buffer.readiness())
        self.buffer.record(merged.chunk)
        assert self.actor.actor is not None
        self.actor.actor.record(active.values(), merged.revoked)

    def end_step(self) -> None:
        batch = self.buffer.take_batch()
        for planner in (self.actor, self.listener):
            for book in planner.scorers.values():
                for own in batch:
                    book.forget(own.seq_id)
            planner.scorers["critic"].reset()
        assert self.actor.actor is not None
        self.actor.actor.invalidate()


def steps_of(run: Run, count: int, visit: Callable[[PlannedRound, PlannedRound], None]) -> None:
    """PPO steps with streamed scoring; `visit` sees the plans of every round."""
    for _ in range(count):
        run.admit()
        while not run.buffer.readiness().ready:
            visit(*run.round())
        while any(book.owes(run.buffer.rollouts) for book in run.actor.scorers.values()):
            visit(*run.round(decode=False))
        run.end_step()


def together(site: Site, with_actor: PlannedRound, without: PlannedRound) -> Schedule:
    """The lists that the ranks would carry out, each by its own plan."""
    actor_ranks = site.places["actor"].ranks
    ranks = sorted({rank for place in site.places.values() for rank in place.ranks})
    return Schedule({r: (with_actor if r in actor_ranks else without).schedule.of(r) for r in ranks})


def budgets_of(site: Site, slots: int) -> dict[str, list[KVBudget]]:
    return {name: [KVBudget(slots, BUDGET)] * place.dp for name, place in site.places.items()}


@settings(deadline=None, max_examples=25)
@given(
    placed=st.one_of(
        st.tuples(st.sampled_from(list(SITES.items())), st.sampled_from(list(GENERATORS))),
        st.tuples(st.sampled_from(list(SPREAD.items())), st.just("intra")),
    ),
    slots=st.integers(7, 9),
    micro_batches=st.sampled_from(["auto", 1, 2, 3]),
    seed=st.integers(0, 10**6),
)
def test_what_all_ranks_plan_for_themselves_is_sound_together(
    placed: tuple[tuple[str, Site], str], slots: int, micro_batches: Any, seed: int
) -> None:
    """The memo of schedules has its part in it: rounds of the same shape and other sizes get what was made once."""
    (_, site), generator = placed
    run = Run(
        new_planner(site, generator, True, slots, micro_batches=micro_batches),
        new_planner(site, generator, False, slots, micro_batches=micro_batches),
        random.Random(seed),
    )

    def visit(with_actor: PlannedRound, without: PlannedRound) -> None:
        round_ = replace(with_actor.round, index=1)
        assert check(together(site, with_actor, without), round_, site, budgets_of(site, slots)) == []

    steps_of(run, 3, visit)


@pytest.mark.parametrize("name", [*SITES, *SPREAD])
def test_woven_is_chosen_where_every_rank_that_it_ties_knows_of_the_decoding(name: str) -> None:
    site = (SITES | SPREAD)[name]
    shares = name not in SPREAD and "|" not in name
    assert round_generator(OverlapConfig(), site) == ("woven" if shares else "intra")
    assert round_generator(OverlapConfig(intra=False), site) == "sequential"
    assert round_generator(OverlapConfig(schedule="intra"), site) == "intra"


@pytest.mark.parametrize("name", ["PP2 | 1", "DP2 | PP2xDP2", "PP2, critic beside it, others apart"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_a_listener_plans_its_own_actions_alike(name: str, generator: str) -> None:
    """It plans the very list that the actor's ranks plan for it, though it does not know what is decoded."""
    site = SITES[name]
    run = Run(*(new_planner(site, generator, holds, 8) for holds in (True, False)), random.Random(4))
    seen = []

    def visit(with_actor: PlannedRound, without: PlannedRound) -> None:
        seen.append(with_actor)
        assert "actor" not in without.works
        for rank in site.listeners:
            assert without.schedule.of(rank) == with_actor.schedule.of(rank)

    steps_of(run, 3, visit)
    assert len(seen) > 6


def test_a_schedule_is_made_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    generate = GENERATORS["woven"]

    def counted(*args: Any) -> Schedule:
        made.append(args)
        return generate(*args)

    monkeypatch.setattr(planner_module, "GENERATORS", {"woven": counted})
    site = SITES["colocated PP2"]
    settled: dict[str, Any] = {"micro_batches": 2, "prefill_tokens": BUDGET}
    run = Run(*(new_planner(site, "woven", True, 9, **settled) for _ in range(2)), random.Random(8))
    plans: list[PlannedRound] = []

    def visit(with_actor: PlannedRound, _: PlannedRound) -> None:
        plans.append(with_actor)
        assert check(with_actor.schedule, replace(with_actor.round, index=1), site, budgets_of(site, 9)) == []

    run.listener.plan = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
    steps_of(run, 8, visit)
    shapes = {shape(plan) for plan in plans}
    assert len(made) == len(shapes) < len(plans)
    assert [plan.round.index for plan in plans] == list(range(1, len(plans) + 1))


def shape(plan: PlannedRound) -> Any:
    round_ = plan.round
    prefill = {role: tuple(map(len, replicas)) for role, replicas in round_.prefill.items()}
    return round_.steps, tuple(map(len, round_.decode)), tuple(sorted(prefill.items()))


def cut_of(planned: PlannedRound) -> tuple[int, int]:
    """Decode micro-batches, and prefill micro-batches of the reward model."""
    return len(planned.round.decode[0]), len(planned.round.prefill["reward"][0])


def first_round(site: Site, generator: str, costs: Costs, **weave: Any) -> PlannedRound:
    planner = new_planner(site, generator, True, 16, **weave)
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
    settled = first_round(SITES["colocated PP2"], generator, CHEAP_STARTS, micro_batches=3, prefill_tokens=24)
    assert cut_of(settled) == (3, 3)  # twelve prompts of six tokens: four to a micro-batch
    assert all(sum(g.new for g in batch) <= 24 for batch in settled.works["reward"][0].prefill)


def test_a_round_without_decoding_asks_nothing_of_the_actor() -> None:
    for holds_actor in (True, False):
        planner = new_planner(SITES["colocated PP2"], "woven", holds_actor, 8)
        buffer = RolloutBuffer(4, 0, 1)
        score: Sequence[Any] = buffer.admit(Prompt(i, i, "", (1, 2)) for i in range(4))
        planned = planner.plan(1, [], score, CHUNK, list)
        assert "actor" not in planned.works and not planned.round.decodes
        assert {action.op for action in planned.schedule} <= {Op.PREFILL, Op.SCORE, Op.SEND, Op.RECV}
