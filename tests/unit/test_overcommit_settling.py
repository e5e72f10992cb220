"""Properties of responses that end early, over whole runs on the tiny decode engine of `test_overcommit_simulation.py`.

Each part of a response's reward is given, and the token that settles it, so that what is cut and dropped is known beforehand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.filter import GroupFilter, Rule, VerdictClock
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.overcommit.settling import Clock, Prefix, Settler, known
from oppo_megatron.records import Prompt, Rollout
from tests.unit.test_overcommit_ahead import Deltas
from tests.unit.test_overcommit_filter import NO_SIGNALS
from tests.unit.test_overcommit_simulation import CHUNKS, Log, decode_round, token

LABELS = ("format", "answer")


@dataclass(frozen=True)
class Run:
    """Of each response its length and, for each part, its value and the tokens that settle it (0: nothing before its end).

    `every`: decode steps between two admissions, None without backfill; `metric`: the parts that groups are filtered by, if
    they are; `period` 0: nothing ends early."""

    lengths: list[int]
    values: list[tuple[float, float]]
    settled_at: list[tuple[int, int]]
    batch_size: int
    group_size: int
    deltas: list[int]
    period: int
    audit: int = 0
    every: int | None = None
    metric: tuple[str, ...] = ()
    max_staleness: int = 2

    def settles(self, seq_id: int) -> int:
        """Tokens that settle the whole reward; 0: none do."""
        places = self.settled_at[seq_id]
        return max(places) if all(places) and max(places) <= self.lengths[seq_id] else 0

    def prefix(self, rollout: Rollout) -> Prefix:
        have, i = rollout.num_response_tokens, rollout.seq_id
        parts = tuple(
            v if 0 < at <= have else math.nan for v, at in zip(self.values[i], self.settled_at[i], strict=True)
        )
        return Prefix(parts, 0 if any(map(math.isnan, parts)) else self.settles(i))


@dataclass
class Story:
    """Everything that may not depend on the size of a chunk."""

    batches: list[list[tuple[int, tuple[int, ...], int | None, str | None]]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # clock, sequence
    figures: list[dict[str, float | None]] = field(default_factory=list)

    def groups(self, size: int) -> list[list[int]]:
        return [sorted({i // size for i, *_ in batch}) for batch in self.batches]


class Simulation:
    def __init__(self, run: Run, position: int = 0, deltas: Deltas | None = None):
        prompts = (Prompt(i, row=i, text="", tokens=(0,)) for i in range(position, len(run.lengths)))
        self.run, self.deltas, self.story, self.in_step = run, deltas or Deltas(run.deltas), Story(), False
        self.buffer = RolloutBuffer(
            run.batch_size, run.deltas[0], run.max_staleness, backfill=run.every is not None, group_size=run.group_size,
            filtered=bool(run.metric),
        )  # fmt: skip
        self.scheduler = OvercommitScheduler(prompts, self.buffer, self.deltas, run.every)
        self.settler = Settler(self.buffer, Clock(run.period, run.audit), LABELS) if run.period else None
        rule = Rule(run.metric, sum, 10**6)
        self.filter = GroupFilter(self.scheduler, VerdictClock(run.every or 1), rule) if run.metric else None

    def judge(self, due: Sequence[Rollout]) -> list[list[float]]:
        return [[self.run.values[r.seq_id][LABELS.index(label)] for label in self.run.metric] for r in due]

    def end_early(self) -> None:
        settler = self.settler
        if settler is not None and settler.due:
            asked = settler.asked()
            prefixes = [self.run.prefix(rollout) for rollout in asked]
            settler.take(asked, prefixes)
            if self.filter is not None:
                found = {i: known(p, LABELS, self.run.metric) for i, p in settler.foreseen(asked, prefixes).items()}
                self.filter.foreseen = {i: scores for i, scores in found.items() if scores is not None}
        if self.filter is not None:
            gone = self.filter.settle(self.judge)
            self.story.dropped += [(self.buffer.clock, rollout.seq_id) for rollout in gone]
            if settler is not None:
                settler.retire(gone)

    def begin(self) -> None:
        self.scheduler.begin_step()
        if self.settler is not None:
            self.settler.begin_step()
        if self.filter is not None:
            self.filter.begin_step()
            self.filter.settle(self.judge)
        self.in_step = True

    def round(self, chunk: int) -> None:
        self.scheduler.backfill()
        steps = self.scheduler.chunk(chunk)
        steps = steps if self.settler is None else min(steps, self.settler.clock.left(self.buffer.clock))
        decode_round(self.buffer, self.run.lengths, version=0, index=0, chunk_tokens=steps, log=Log())
        self.end_early()

    def end(self) -> None:
        batch = self.scheduler.take_batch()
        self.in_step = False
        self.story.batches.append([(r.seq_id, tuple(r.tokens), r.finish_clock, r.finish_reason) for r in batch])
        if self.filter is not None:
            self.filter.retire(batch)
        if self.settler is not None:
            self.settler.retire(batch)
            self.story.figures.append(self.settler.figures())
        self.scheduler.end_step(len(self.story.batches), NO_SIGNALS)

    def play(self, chunk: int, rounds: int | None = None) -> Story:
        while not self.scheduler.done:
            if not self.in_step:
                self.begin()
            while not self.buffer.readiness().ready:
                if rounds is not None and rounds <= 0:
                    return self.story
                rounds = None if rounds is None else rounds - 1
                self.round(chunk)
            self.end()
        return self.story

    def restored(self) -> Simulation:
        """Through JSON, as a checkpoint keeps it."""
        parts: list[Any] = [self.scheduler, self.filter, self.settler, self.deltas]
        state = json.loads(json.dumps([part and part.state_dict() for part in parts]))
        again = Simulation(self.run, self.scheduler.position, Deltas(self.run.deltas))
        again.scheduler.load_state_dict(state[0], self.buffer.rollouts)
        for part, held in ((again.filter, state[1]), (again.settler, state[2])):
            if part is not None:
                part.load_state_dict(held)
        again.story, again.in_step = self.story, self.in_step
        return again


@st.composite
def plans(draw: st.DrawFn, *, carries: bool = True) -> Run:
    size, groups = draw(st.integers(2, 3)), draw(st.integers(2, 8))
    numbers = st.lists(st.integers(1, 30), min_size=size * groups, max_size=size * groups)
    values = st.lists(
        st.tuples(*[st.sampled_from([0.0, 1.0])] * 2), min_size=size * groups, max_size=size * groups
    )
    places = st.lists(st.tuples(*[st.integers(0, 20)] * 2), min_size=size * groups, max_size=size * groups)
    filtered = draw(st.sampled_from([(), LABELS, LABELS[:1]]))
    every = draw(st.integers(1, 9)) if filtered or (carries and draw(st.booleans())) else None
    deltas = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) if carries else [0]
    return Run(
        draw(numbers), draw(values), draw(places), size * draw(st.integers(1, 3)), size, deltas,
        period=draw(st.integers(1, 9)), audit=draw(st.sampled_from([0, 1, 2, 5])), every=every, metric=filtered, max_staleness=3,
    )  # fmt: skip


@given(run=plans())
@settings(max_examples=60, deadline=None)
def test_the_chunk_size_changes_nothing(run: Run) -> None:
    stories = [Simulation(run).play(chunk) for chunk in CHUNKS]
    assert all(story == stories[0] for story in stories)


@given(run=plans(), chunk=st.sampled_from(CHUNKS))
@settings(max_examples=60, deadline=None)
def test_a_response_ends_with_the_token_that_settles_it_or_where_it_would(run: Run, chunk: int) -> None:
    story = Simulation(run).play(chunk)
    for seq_id, tokens, clock, reason in (row for batch in story.batches for row in batch):
        expected = run.settles(seq_id) if reason == "settled" else run.lengths[seq_id]
        assert tokens == tuple(token(seq_id, n) for n in range(expected))
        if reason == "settled":
            assert clock is not None and clock % run.period == 0
            assert not Clock(run.period, run.audit).audits(seq_id // run.group_size), "an audit goes on to the end"
    trained_or_dropped = [i for batch in story.batches for i, *_ in batch] + [i for _, i in story.dropped]
    assert sorted(trained_or_dropped) == list(range(len(run.lengths)))


@given(run=plans(carries=False), chunk=st.sampled_from(CHUNKS))
@settings(max_examples=60, deadline=None)
def test_where_nothing_is_carried_the_same_groups_are_trained_and_dropped(run: Run, chunk: int) -> None:
    """Ending early decides how long a response is, never which: dropped groups would have been dropped at their ends."""
    early, whole = Simulation(run).play(chunk), Simulation(replace(run, period=0)).play(chunk)
    assert early.groups(run.group_size) == whole.groups(run.group_size)
    assert sorted(i for _, i in early.dropped) == sorted(i for _, i in whole.dropped)


@given(run=plans(), chunk=st.sampled_from(CHUNKS), rounds=st.lists(st.integers(0, 6), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_run_that_is_interrupted_goes_on_as_if_it_had_not_been(run: Run, chunk: int, rounds: list[int]) -> None:
    plain, simulation = Simulation(run).play(chunk), Simulation(run)
    for count in rounds:
        simulation.play(chunk, count)
        simulation = simulation.restored()
    assert simulation.play(chunk) == plain


def plain_run(**changes: Any) -> Run:
    """Groups of two; the first part settles with the third token, the second never before the end."""
    run = Run([30, 20] * 4, [(0.0, 1.0)] * 8, [(3, 0)] * 8, batch_size=4, group_size=2, deltas=[0], period=4)
    return replace(run, **changes)


def test_what_is_foreseen_outlives_a_stop() -> None:
    """Rewards are asked every 7 steps and verdicts come every 3: one of them may fall between, behind a stop."""
    run = plain_run(period=7, every=3, metric=LABELS[:1])
    plain, simulation = Simulation(run).play(7), Simulation(run)
    simulation.play(7, rounds=3)
    assert simulation.filter is not None and simulation.buffer.clock == 7 and len(simulation.filter.foreseen) == 4
    assert simulation.restored().play(7) == plain and plain.dropped[0] == (9, 0)


def test_all_parts_have_to_be_settled() -> None:
    assert {row[3] for batch in Simulation(plain_run()).play(7).batches for row in batch} == {"eos"}
    both = Simulation(plain_run(settled_at=[(3, 2)] * 8)).play(7)
    assert {(len(tokens), clock, why) for _, tokens, clock, why in both.batches[0]} == {(3, 4, "settled")}


def test_a_group_whose_judged_parts_are_settled_alike_stops_at_once() -> None:
    """It is dropped by the first part, at the first verdict, though its responses go on and the second part is open."""
    run = plain_run(metric=LABELS[:1], every=4)
    assert {clock for clock, _ in Simulation(run).play(7).dropped} == {4, 8}
    assert {clock for clock, _ in Simulation(replace(run, period=0)).play(7).dropped} == {32, 64}
    apart = replace(run, values=[(0.0, 1.0), (1.0, 1.0)] * 4)
    assert Simulation(apart).play(7).dropped == [], "groups that differ are trained"


def test_an_audit_goes_on_to_the_end_and_says_what_is_saved() -> None:
    """Group 0 of two in the first batch is not cut; its responses have 27 and 17 tokens beyond their third."""
    run = plain_run(settled_at=[(3, 2)] * 8, audit=2)
    first = Simulation(run).play(7)
    assert [(i, len(tokens)) for i, tokens, *_ in first.batches[0]] == [(2, 3), (3, 3), (0, 30), (1, 20)]
    assert first.figures[0] == {
        "settled_rows": 2, "settled_tokens": 44.0, "audited_rows": 2, "audited_tokens": 44
    }  # fmt: skip
    assert Simulation(replace(run, audit=0)).play(7).figures[0] == {
        "settled_rows": 4, "settled_tokens": None, "audited_rows": 0, "audited_tokens": 0
    }  # fmt: skip


def test_an_audited_group_is_dropped_at_its_end_only() -> None:
    """Also where its judged part is settled alike much sooner; so what it was settled as is held against what it comes to."""
    run = plain_run(metric=LABELS[:1], every=4)
    assert Simulation(replace(run, audit=1)).play(7).dropped == Simulation(replace(run, period=0)).play(7).dropped


def test_what_is_settled_is_not_asked_for_again() -> None:
    simulation = Simulation(plain_run(settled_at=[(3, 2)] * 4 + [(3, 0)] * 4, audit=1, batch_size=8))
    assert simulation.settler is not None
    simulation.play(4, rounds=1)
    assert [r.seq_id for r in simulation.settler.asked()] == [4, 5, 6, 7] and len(simulation.buffer.active) == 8


def test_parts_are_known_where_all_that_count_are_settled() -> None:
    prefix = Prefix((0.5, math.nan))
    assert known(prefix, LABELS, LABELS[:1]) == [0.5]
    assert known(prefix, LABELS, LABELS) is known(prefix, LABELS, LABELS[1:]) is None


def test_the_seed_says_which_groups_are_audited() -> None:
    assert [Clock(4, 3, seed).audits(group) for seed in (0, 1) for group in range(4)] == [
        True, False, False, True, False, False, True, False
    ]  # fmt: skip
    assert not any(Clock(4, 0).audits(group) for group in range(9))


def test_what_other_parts_were_settled_as_is_forgotten() -> None:
    simulation = Simulation(plain_run(settled_at=[(3, 2)] * 8, audit=1))
    simulation.play(4, rounds=2)
    settler = simulation.settler
    assert settler is not None and settler.notes[0] == Prefix((0.0, 1.0), 3)
    state = json.loads(json.dumps(settler.state_dict()))
    settler.notes = {}
    settler.load_state_dict(state | {"labels": ["format", "other"]})
    assert settler.notes == {}
    settler.load_state_dict(state)
    assert settler.notes[1] == Prefix((0.0, 1.0), 3)


@pytest.mark.parametrize(("clock", "left"), [(0, 4), (1, 3), (4, 4), (7, 1)])
def test_a_round_ends_where_rewards_are_asked(clock: int, left: int) -> None:
    assert Clock(4).left(clock) == left
