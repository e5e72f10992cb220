"""Properties of the filter of groups over whole runs, on the tiny decode engine of `test_overcommit_simulation.py`.
Each response's score is given, so what is dropped is known beforehand; `judge` notes when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.errors import SamplingError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import GroupFilter, OvercommitScheduler, Rule, VerdictClock
from oppo_megatron.records import Prompt, Rollout
from tests.unit.test_overcommit_simulation import CHUNKS, NO_SIGNALS, Deltas, Log, NaiveGroup, decode_round


@dataclass(frozen=True)
class Run:
    """A run's plan: lengths, scores, batch and group size, delta per step in groups; `steps` None: the prompts end the run."""

    lengths: list[int]
    scores: list[float]
    batch_size: int
    group_size: int
    deltas: list[int]
    max_staleness: int
    every: int
    lag: int
    steps: int | None = None
    max_groups: int = 10**6

    def drops(self, group: int) -> bool:
        first, *others = self.scores[group * self.group_size : (group + 1) * self.group_size]
        return all(score == first for score in (first, *others))


@dataclass
class Story:
    """The part of a run that may not depend on the size of a chunk."""

    batches: list[list[Rollout]] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # clock, sequence
    judged: list[tuple[int, int]] = field(default_factory=list)
    entered: list[tuple[int, int]] = field(default_factory=list)
    known: list[int] = field(default_factory=list, compare=False)  # after each round, of which smaller chunks make more


class Simulation:
    """A run up to where it stands; `restored` is the same from what a checkpoint would hold."""

    def __init__(self, run: Run, position: int = 0, to_train: int | None = None, deltas: Deltas | None = None):
        prompts = (Prompt(i, row=i, text="", tokens=(0,)) for i in range(position, len(run.lengths)))
        self.run = run
        groups = {"backfill": True, "group_size": run.group_size, "filtered": True}
        self.buffer = RolloutBuffer(run.batch_size, run.deltas[0], run.max_staleness, **groups)
        if to_train is None and run.steps is not None:
            to_train = run.steps * run.batch_size
        self.deltas = deltas or Deltas(run.deltas)
        self.scheduler = OvercommitScheduler(prompts, self.buffer, self.deltas, run.every, to_train)
        rule = Rule(("acc",), lambda parts: parts[0], run.max_groups)
        self.filter = GroupFilter(self.scheduler, VerdictClock(run.every, run.lag), rule)
        self.story, self.done, self.in_step, self.held, self.sure = Story(), 0, False, 0, set[int]()

    def judge(self, due: Sequence[Rollout]) -> list[list[float]]:
        assert all(rollout.finished for rollout in due)
        self.story.judged += [(self.buffer.clock, rollout.seq_id) for rollout in due]
        return [[self.run.scores[rollout.seq_id]] for rollout in due]

    def settle(self) -> None:
        dropped = self.filter.apply_verdicts(self.judge)
        self.story.dropped += [(self.buffer.clock, rollout.seq_id) for rollout in dropped]
        self.story.known.append(self.filter.known)
        held = {rollout.seq_id for rollout in self.buffer.rollouts}
        for group in {seq_id // self.run.group_size for seq_id in held if self.run.drops(seq_id // self.run.group_size)}:
            members = range(group * self.run.group_size, (group + 1) * self.run.group_size)
            assert not self.filter.scores.keys() >= set(members), "a group leaves with its last member's verdict"
        before, self.sure = self.sure, set(self.buffer.sure.tolist())
        assert before <= self.sure, "what was sure stays so"

    def enter(self, rollouts: Sequence[Rollout]) -> None:
        self.story.entered += [(self.buffer.clock, rollout.seq_id) for rollout in rollouts]
        assert len(self.buffer) <= max(self.buffer.capacity, self.held), "no more than B + delta groups, whatever their state"
        self.held = len(self.buffer)

    def begin(self) -> None:
        self.held, self.sure = len(self.buffer), set()
        self.enter(self.scheduler.begin_step())
        self.filter.begin_step()
        self.settle()
        self.in_step = True

    def round(self, chunk_tokens: int) -> None:
        self.held = len(self.buffer)
        self.enter(self.scheduler.backfill())
        assert self.buffer.active, "there is something to decode, or the batch is complete"
        steps = self.scheduler.chunk(chunk_tokens)
        decode_round(self.buffer, self.run.lengths, version=self.done, index=0, chunk_tokens=steps, log=Log())
        self.settle()

    def end(self) -> None:
        sure, batch = set(self.buffer.sure.tolist()), self.scheduler.take_batch()
        assert sure == {rollout.seq_id for rollout in batch}
        self.filter.retire(batch)
        self.in_step = False
        if not batch:
            assert self.scheduler.done, "only the end of the prompts leaves nothing"
            return
        self.story.batches.append(list(batch))
        self.story.clocks.append(self.buffer.clock)
        self.scheduler.end_step(self.done, NO_SIGNALS)
        self.done += 1

    def play(self, chunk_tokens: int, rounds: int | None = None) -> Story:
        while not self.scheduler.done and self.done != self.run.steps:
            if not self.in_step:
                self.begin()
            while not self.buffer.readiness().ready:
                if rounds is not None and rounds <= 0:
                    return self.story
                rounds = None if rounds is None else rounds - 1
                self.round(chunk_tokens)
            self.end()
        return self.story

    def restored(self) -> Simulation:
        state = json.loads(json.dumps([self.scheduler.state_dict(), self.filter.state_dict(), self.deltas.state_dict()]))
        to_train = None if self.run.steps is None else (self.run.steps - self.done) * self.run.batch_size
        again = Simulation(self.run, self.scheduler.position, to_train, Deltas(self.run.deltas))
        again.scheduler.load_state_dict(state[0], self.buffer.rollouts)
        again.filter.load_state_dict(state[1])
        again.story, again.done, again.in_step = self.story, self.done, self.in_step
        return again


@st.composite
def plans(draw: st.DrawFn) -> Run:
    size, groups = draw(st.sampled_from([2, 3])), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.one_of(st.integers(1, 4), st.integers(1, 12), st.integers(20, 90)), max_size=60))
    lengths = lengths[: len(lengths) // size * size]
    return Run(
        lengths=lengths, scores=draw(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=len(lengths), max_size=len(lengths))),
        batch_size=groups * size, group_size=size, deltas=draw(st.lists(st.integers(0, groups), min_size=1, max_size=4)),
        max_staleness=draw(st.integers(1, 3)), every=draw(st.integers(1, 9)), lag=draw(st.integers(0, 2)),
        steps=draw(st.none() | st.integers(1, 4)),
    )  # fmt: skip


@given(run=plans(), chunk_tokens=st.sampled_from(CHUNKS))
@settings(max_examples=250)
def test_whole_runs(run: Run, chunk_tokens: int) -> None:
    simulation = Simulation(run)
    story = simulation.play(chunk_tokens)
    assert [[(r.seq_id, r.finish_clock) for r in batch] for batch in story.batches] == naive_batches(run)
    assert story == Simulation(run).play(max(CHUNKS)), "the size of a chunk changes nothing"
    trained = [r for batch in story.batches for r in batch]
    dropped = [seq_id for _, seq_id in story.dropped]
    groups = {seq_id // run.group_size for seq_id in dropped}
    assert all(map(run.drops, groups)) and not any(run.drops(r.seq_id // run.group_size) for r in trained)
    found = sorted([r.seq_id for r in trained] + dropped)
    assert found == list(range(len(run.lengths))) if run.steps is None else len(set(found)) == len(found)
    assert all(len(r.tokens) == run.lengths[r.seq_id] for r in trained)
    assert all(len(batch) == run.batch_size for batch in story.batches[:-1]) and all(story.batches)
    judged = {seq_id: clock for clock, seq_id in story.judged}
    assert len(judged) == len(story.judged), "scores are asked for once"
    for batch, clock in zip(story.batches, story.clocks, strict=True):
        assert clock % run.every == 0
        for rollout in batch:
            assert rollout.finish_clock is not None and rollout.deferrals <= run.max_staleness
            assert judged[rollout.seq_id] == run.every * (-(-rollout.finish_clock // run.every) + run.lag) <= clock
        n = run.group_size
        groups = [batch[i : i + n] for i in range(0, len(batch), n)]
        assert all([r.seq_id % n for r in group] == list(range(n)) for group in groups)
        keys = [(max(r.finish_clock or 0 for r in group), group[0].admission) for group in groups]
        assert keys == sorted(keys)
    check_end(run, simulation)


def check_end(run: Run, simulation: Simulation) -> None:
    """Admission ends with trained + kept + undecided = steps * B; fewer steps are made only if the prompts end before."""
    story = simulation.story
    if run.steps is None:
        return
    assert len(story.batches) <= run.steps
    if len(story.batches) == run.steps and all(len(batch) == run.batch_size for batch in story.batches):
        assert len(simulation.buffer) == 0 and len(story.entered) == run.steps * run.batch_size + len(story.dropped)
    else:
        assert len(story.entered) == len(run.lengths), "the prompts have ended"


@given(run=plans(), chunk_tokens=st.sampled_from(CHUNKS), rounds=st.lists(st.integers(0, 5), max_size=4))
@settings(max_examples=150)
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_been(run: Run, chunk_tokens: int, rounds: list[int]) -> None:
    plain = Simulation(run).play(chunk_tokens)
    simulation = Simulation(run)
    for count in rounds:
        simulation.play(chunk_tokens, count)
        counts = simulation.filter.counts
        simulation = simulation.restored()
        assert simulation.filter.counts == counts
    assert simulation.play(chunk_tokens) == plain


def naive_batches(run: Run) -> list[list[tuple[int, int]]]:
    n, clock, held, batches = run.group_size, 0, dict[int, NaiveGroup](), list[list[tuple[int, int]]]()
    waiting = list(range(len(run.lengths) // n))

    def enter() -> None:
        places = run.batch_size // n + run.deltas[len(batches) % len(run.deltas)]
        quota = len(run.lengths) if run.steps is None else (run.steps - len(batches)) * run.batch_size // n
        while waiting and len(held) < min(places, quota):
            newest = waiting.pop(0)
            held[newest] = NaiveGroup(run.lengths[newest * n : (newest + 1) * n], [0] * n)

    def kept(group: NaiveGroup) -> bool:
        return group.ended and run.every * (-(-group.end // run.every) + run.lag) <= clock

    while (waiting or held) and len(batches) != run.steps:
        enter()
        while True:
            size = run.batch_size // n if waiting else min(run.batch_size // n, len(held))
            must = [g for g in held if held[g].age >= run.max_staleness]
            ready = [g for _, g in sorted((held[g].end, g) for g in held if kept(held[g]))]
            if clock % run.every == 0 and len(ready) >= size and set(must) <= set(ready):
                break
            clock += 1
            for group in held.values():
                group.advance(clock)
            if clock % run.every == 0:
                for g in [g for g in held if kept(held[g]) and run.drops(g)]:
                    del held[g]
                size = run.batch_size // n if waiting else min(run.batch_size // n, len(held))
                ready = [g for g in held if kept(held[g])]
                if len(ready) < size or not all(g in ready for g in held if held[g].age >= run.max_staleness):
                    enter()
        chosen = [*must, *(g for g in ready if g not in must)][:size]
        if chosen:
            in_order = sorted(chosen, key=lambda g: (held[g].end, g))
            batches.append([(g * n + i, held[g].ends[i]) for g in in_order for i in range(n)])
        held = {g: group for g, group in held.items() if g not in chosen}
        for group in held.values():
            group.age += 1
    return batches


def plain_run(**changes: Any) -> Run:
    run = Run([3] * 40, [0.0, 1.0] * 20, batch_size=4, group_size=2, deltas=[1], max_staleness=2, every=4, lag=0)
    return replace(run, **changes)


def test_a_filter_that_drops_everything_ends_the_run_with_its_keep_rate() -> None:
    with pytest.raises(SamplingError, match=r"^6 groups were judged in this step, and 0 of them kept \(0\.0%\), but a"):
        Simulation(plain_run(scores=[1.0] * 40, max_groups=6)).play(7)
    story = Simulation(plain_run(scores=[1.0] * 40)).play(7)
    assert story.batches == [] and len(story.dropped) == 40, "without a bound the prompts are the end"
    # The bound is of one step.  Every second group is dropped: 4 judged for a batch of 2, step after step, are within 5.
    scores = [0.0, 1.0, 1.0, 1.0] * 10
    assert len(Simulation(plain_run(scores=scores, deltas=[0], max_groups=5)).play(7).batches) == 5
    with pytest.raises(SamplingError, match="4 groups were judged"):
        Simulation(plain_run(scores=[1.0] * 4 + scores, lengths=[3] * 44, deltas=[0], max_groups=3)).play(7)


def test_a_group_is_known_to_be_kept_as_soon_as_two_members_differ() -> None:
    run = plain_run(lengths=[3, 3, 30] * 4, scores=[0.0, 1.0, 1.0] * 4, group_size=3, batch_size=3, deltas=[0])
    story = Simulation(run).play(4)
    assert story.known[:2] == [0, 1] and 0 in story.known[2:]
    equal = Simulation(replace(run, scores=[1.0, 1.0, 0.0] * 4)).play(4)
    assert set(equal.known) == {0}, "what has ended is the same: nothing is known"
    run = plain_run(lengths=[1, 1, 1, 3, 3, 30], scores=[1.0, 1.0, 1.0, 0.0, 1.0, 1.0], group_size=3, batch_size=3, max_groups=1)
    with pytest.raises(SamplingError, match=r"1 groups were judged .* but a batch has 1 \(1 more will be kept when"):
        Simulation(run).play(4)


EQUAL, OTHER = (0.7, 0.7 + 1e-7), (0.7, 0.7 + 1e-5)
"""As far as rounding parts scores, and farther."""


@pytest.mark.parametrize("scores", [(nan, nan), (nan, 1.0), (1.0, nan), (inf, 1.0), EQUAL, OTHER])
def test_scores_that_are_no_numbers_are_never_dropped_and_those_that_rounding_parts_are_equal(scores: Any) -> None:
    """A guard is to see what is no number."""
    simulation = Simulation(plain_run(lengths=[3, 3, 4, 4], scores=[*scores, 0.0, 1.0], batch_size=2))
    assert [r.seq_id for r in simulation.play(7).batches[0]] == ([2, 3] if scores == EQUAL else [0, 1])


def test_scores_of_other_parts_are_judged_anew() -> None:
    simulation = Simulation(plain_run(lengths=[3, 30] * 20, deltas=[0]))
    simulation.play(4, rounds=1)
    assert len(simulation.filter.scores) == 2
    state = simulation.filter.state_dict()
    simulation.filter.scores = {}
    simulation.filter.load_state_dict(state | {"labels": ["other"]})
    assert simulation.filter.scores == {}
    simulation.filter.load_state_dict(state)
    assert simulation.filter.scores == {0: [0.0], 2: [0.0]}


def test_no_response_ends_a_round_of_a_filtered_step_and_a_resumed_one_leaves_prompts_to_backfill() -> None:
    """Verdicts do, between rounds: what ends within one leaves the decode batch as it is planned."""
    simulation = Simulation(plain_run(deltas=[0]))
    simulation.begin()
    readiness = simulation.buffer.readiness()
    for rollout in simulation.buffer.active:
        readiness.finish(rollout.seq_id)
    assert not readiness.ready
    simulation.round(64)
    assert simulation.buffer.clock == 4 and simulation.buffer.readiness().ready
    simulation = Simulation(plain_run(scores=[1.0] * 40, deltas=[0]))
    simulation.begin()
    simulation.round(64)
    assert len(simulation.buffer) == 0 and simulation.buffer.clock == simulation.scheduler.due == 4
    again = simulation.restored().scheduler
    assert again.refill() == [] and len(again.backfill()) == 4
