"""The rollout buffer by hand-made cases; a run with other settings makes the steps that are asked for, or is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError, StreamError
from oppo_megatron.overcommit import ahead as ahead_module
from oppo_megatron.overcommit.ahead import (
    NEW_RUN,
    Ahead,
    Readiness,
    next_groups,
    require_bounded_deferrals,
    require_prompts,
    require_resumable,
)
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import ALONE, Members, Prompt, Rollout
from tests.unit.test_data_prompts import plain_set
from tests.unit.test_overcommit_simulation import NO_SIGNALS, Deltas, Log, decode_round


def prompts(*seq_ids: int) -> list[Prompt]:
    return [Prompt(seq_id, row=seq_id, text=f"p{seq_id}", tokens=(1, 2)) for seq_id in seq_ids]


def row(seq_id: int, offset: int, tokens: list[int], finish_clock: int | None = None, version: int = 0) -> ChunkRow:
    reason = None if finish_clock is None else "eos"
    logprobs = [-0.5 * t for t in tokens]
    return ChunkRow(seq_id, offset, tokens, logprobs, [-0.25 * t for t in tokens], version, finish_clock, reason)


def seq_ids(rollouts: list[Rollout]) -> list[int]:
    return [r.seq_id for r in rollouts]


def filled(batch_size: int, delta: int, max_staleness: int = 4) -> RolloutBuffer:
    buffer = RolloutBuffer(batch_size, delta, max_staleness)
    buffer.admit(prompts(*range(batch_size + delta)))
    return buffer


def test_admission_beyond_capacity_or_after_the_end_is_our_own_bug() -> None:
    buffer = RolloutBuffer(batch_size=2, delta=1, max_staleness=4)
    with pytest.raises(AssertionError, match="4 prompts admitted into room for 3"):
        buffer.admit(prompts(0, 1, 2, 3))
    buffer.admit(prompts(0))
    with pytest.raises(AssertionError, match="already in the buffer"):
        buffer.admit(prompts(0))
    buffer.close()
    assert buffer.admit([]) == []
    with pytest.raises(AssertionError, match="after the end"):
        buffer.admit(prompts(1))


def test_more_due_rollouts_than_a_batch_holds_go_oldest_first() -> None:
    """Settings were changed within a run: with B 1 and η 1 no more than two should be held."""
    buffer = filled(1, 3, max_staleness=1)
    buffer.record(Chunk(0, 1, [row(0, 0, [1], 1)]))
    assert not buffer.readiness().ready, "three of the four have to be finished, so that one is left that falls due"
    with pytest.raises(AssertionError, match="before the batch is ready"):
        buffer.take_batch()
    buffer.record(Chunk(1, 4, [row(3, 0, [1], 2), row(2, 0, [1], 3)]))
    assert seq_ids(buffer.take_batch()) == [0] and not buffer.readiness().ready
    buffer.record(Chunk(2, 5, [row(1, 0, [1], 5)]))
    assert [seq_ids(buffer.take_batch()) for _ in range(3)] == [[1], [2], [3]]


def test_readiness_counts_finishes_and_forced_rollouts() -> None:
    readiness = Readiness(target=3, num_finished=1, unfinished={4, 5, 6}, waits=[([6], 1)])
    readiness.finish(4)
    assert not readiness.ready
    readiness.finish(5)
    assert not readiness.ready, "three have finished, but 6 may not be deferred again"
    readiness.finish(6)
    assert readiness.ready
    with pytest.raises(AssertionError, match="sequence 6"):
        readiness.finish(6)


BAD_CHUNKS = {
    "unknown sequence": (Chunk(5, 8, [row(77, 0, [1])]), "sequence 77, offset 0.*not in the buffer"),
    "lost": (Chunk(5, 8, [row(1, 3, [1])]), "sequence 1, offset 3.*has offset 2; a chunk was lost"),
    "repeated": (Chunk(5, 8, [row(1, 0, [1, 1])]), "sequence 1, offset 0.*has offset 2; a chunk was repeated"),
    "after the end": (Chunk(5, 8, [row(0, 2, [1])]), "sequence 0, offset 2.*finished at clock 5"),
    "clock": (Chunk(5, 5, [row(1, 2, [1])]), "sequence 1, offset 2.*clock is 5, but 6"),
    "clock of an empty chunk": (Chunk(5, 5), "chunk 5 .no rows.*clock is 5, but 6"),
    "finish before the round": (Chunk(5, 8, [row(1, 2, [1], 5)]), r"sequence 1, offset 2.*clock 5, outside.*6\.\.8"),
    "finish after the round": (Chunk(5, 8, [row(1, 2, [1], 9)]), r"sequence 1, offset 2.*clock 9, outside.*6\.\.8"),
    "two rows": (Chunk(5, 8, [row(1, 2, [1]), row(1, 3, [1])]), "sequence 1, offset 3.*two rows"),
    "the same row twice": (Chunk(5, 8, [row(1, 2, [1]), row(1, 2, [1])]), "sequence 1, offset 2.*two rows"),
    "second row bad": (Chunk(5, 8, [row(1, 2, [1]), row(2, 9, [1])]), "sequence 2, offset 9.*lost"),
}


@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_a_bad_chunk_is_an_error_and_records_nothing(case: str) -> None:
    buffer = filled(3, 1)
    buffer.record(Chunk(0, 6, [row(0, 0, [1, 1], 5), row(1, 0, [1, 1])]))
    before = copy.deepcopy(buffer.rollouts)
    chunk, message = BAD_CHUNKS[case]
    with pytest.raises(StreamError, match=message):
        buffer.record(chunk)
    assert buffer.rollouts == before and buffer.clock == 6


def test_the_critic_reads_what_is_worth_it() -> None:
    buffer = filled(batch_size=4, delta=2)  # of six unfinished, four will be in the batch
    assert set(buffer.worth_reading().tolist()) == set(range(6))
    for rows, worth in (
        ([row(0, 0, [1, 1], 2), row(3, 0, [1, 1], 1)], set(range(6))),  # two of four unfinished will be in it
        ([row(1, 0, [1], 3)], {0, 1, 3}),  # one of three will be
        ([row(4, 0, [1], 4), row(5, 0, [1], 4)], {0, 1, 3, 4}),  # the fifth finisher is left for the next batch
    ):
        buffer.record(Chunk(0, max(each.finish_clock or 0 for each in rows), rows))
        assert set(buffer.worth_reading().tolist()) == worth
    ages = np.array([2, 2, 2, 1, 1, 0])  # one of the first three is due, and none has ended: the other place is left
    assert next_groups(np.arange(6) == 5, np.zeros(6, dtype=np.int64), ages, 2, 3, 2).tolist() == [5]


@given(data=st.data(), groups=st.integers(0, 12), batch=st.integers(1, 4), most=st.integers(1, 3))
def test_who_comes_first_is_found_without_sorting_all(data: st.DataObject, groups: int, batch: int, most: int) -> None:
    ages = [data.draw(st.integers(0, most)) for _ in range(groups)]
    finished = [data.draw(st.booleans()) for _ in range(groups)]
    clocks, target = [data.draw(st.integers(0, 5)) for _ in range(groups)], data.draw(st.integers(0, batch))
    line = sorted((g for g in range(groups) if finished[g]), key=lambda g: (clocks[g], g))
    chosen, reserved = [g for g in range(groups) if ages[g] >= most], 0
    if len(chosen) <= target:
        for k in range(min(most, groups // batch) + 1):
            members = [g for g in range(groups) if ages[g] >= most - k]
            if len(members) > k * batch:
                missing = len(members) - k * batch - len(set(members) & set(chosen)) - reserved
                room = max(0, min(missing, target - len(chosen) - reserved))
                first = [g for g in line if g in members and g not in chosen][:room]
                chosen, reserved = chosen + first, reserved + max(0, missing - len(first))
        chosen += [g for g in line if g not in chosen][: max(0, target - len(chosen) - reserved)]
    found = next_groups(np.array(finished, dtype=np.bool_), np.array(clocks), np.array(ages), batch, most, target)
    assert found.tolist() == sorted(chosen)[:target]


class Settings(NamedTuple):
    steps: int
    batch_size: int
    deltas: list[int]
    max_staleness: int
    backfill_every: int | None


class Continued:
    def __init__(self, prompts: PromptSet, plan: Settings, lengths: list[int], ahead: Ahead = NEW_RUN):
        limit = ahead.limit(plan.steps, plan.batch_size)
        stream = PromptStream(prompts, 1, limit=limit, start=ahead.position, left_out=ahead.left_out)
        self.buffer = RolloutBuffer(plan.batch_size, plan.deltas[0], plan.max_staleness, backfill=plan.backfill_every is not None)
        self.scheduler = OvercommitScheduler(stream, self.buffer, Deltas(plan.deltas), plan.backfill_every)
        self.plan, self.lengths, self.done, self.batches, self.rounds = plan, lengths, ahead.done, [], 0

    def step(self, *, rounds: int | None = None, begun: bool = False) -> bool:
        """A step of rounds of three decode steps, unless it has `begun`; False where it is left after so many `rounds`."""
        if not begun:
            self.scheduler.begin_step()
        while not self.buffer.readiness().ready:
            if rounds == 0:
                return False
            self.scheduler.backfill()
            decode_round(self.buffer, self.lengths, 0, self.rounds, self.scheduler.chunk(3), Log())
            self.rounds, rounds = self.rounds + 1, None if rounds is None else rounds - 1
        self.batches.append(self.scheduler.take_batch())
        self.done += 1
        self.scheduler.end_step(self.done, NO_SIGNALS)
        return True

    def resumed(self, prompts: PromptSet, plan: Settings) -> Continued:
        held = self.buffer.rollouts
        ahead = Ahead(self.done, self.scheduler.position, len(held))
        require_resumable(self.done, plan.steps)
        if self.done != plan.steps:
            require_bounded_deferrals([each.deferrals for each in held], plan.batch_size, 1, plan.max_staleness)
        run = Continued(prompts, plan, self.lengths, ahead)
        run.scheduler.load_state_dict(self.scheduler.state_dict(), held)
        return run


@st.composite
def plans(draw: st.DrawFn, most: int) -> Settings:
    batch_size = draw(st.integers(1, 6))
    staleness = draw(st.integers(1, 3))
    deltas = draw(st.lists(st.integers(0, staleness * batch_size), min_size=1, max_size=4))
    return Settings(draw(st.integers(1, most)), batch_size, deltas, staleness, draw(st.none() | st.integers(1, 5)))


@given(first=plans(4), then=plans(7), after=st.integers(0, 4), rounds=st.none() | st.integers(0, 4), data=st.data())
@settings(max_examples=300)
def test_a_resumed_run_makes_the_steps_that_are_asked_for(
    first: Settings, then: Settings, after: int, rounds: int | None, data: st.DataObject
) -> None:
    prompts = plain_set(150)
    run = Continued(prompts, first, data.draw(st.lists(st.integers(1, 12), min_size=150, max_size=150)))
    while run.done < min(after, first.steps):
        assert run.step()
    under_way = run.done < first.steps and rounds is not None and not run.step(rounds=rounds)
    done, held = run.done, [each.deferrals for each in run.buffer.rollouts]
    try:
        resumed = run.resumed(prompts, then)
    except CheckpointError as refused:
        assert_remedy_holds(str(refused), done, held, then)
        return
    if under_way and len(resumed.buffer) < resumed.buffer.target:
        resumed.scheduler.refill()
    if under_way and resumed.done < then.steps:
        assert resumed.step(begun=True)
    while resumed.done < then.steps:
        assert not resumed.scheduler.done, "the prompts ended before the steps"
        assert resumed.step()
    assert [len(batch) for batch in resumed.batches] == [then.batch_size] * (then.steps - done)
    assert all(each.deferrals <= then.max_staleness for batch in resumed.batches for each in batch)
    taken = [each.seq_id for batch in (*run.batches, *resumed.batches, resumed.buffer.rollouts) for each in batch]
    assert sorted(taken) == list(range(len(taken))), "each prompt once"
    if (then.steps - done) * then.batch_size >= len(held):
        assert resumed.scheduler.done, "a prompt was admitted that is not trained"


def test_backfill_that_a_step_began_without_starts_at_the_clock_of_the_resumed_run() -> None:
    run = Continued(prompts := plain_set(150), Settings(3, 4, [2], 3, None), [5, 6, 7] * 50, Ahead(left_out=frozenset({1, 3})))
    assert not run.step(rounds=1) and (run.scheduler.num_consumed, run.scheduler.position) == (6, 8)
    assert run.resumed(prompts, Settings(3, 4, [2], 3, 2)).step(begun=True)


def assert_remedy_holds(message: str, done: int, held: list[int], then: Settings) -> None:
    number = int(re.findall(r"(?:set steps to |=)(\d+)(?: or more| to end)", message)[0])
    if message.startswith("steps"):
        require_resumable(done, number)
    elif message.startswith("overlap.max_staleness"):
        try:
            require_bounded_deferrals(held, then.batch_size, 1, number)
        except CheckpointError as error:
            assert "rollout.batch_size" in str(error)
    else:
        require_bounded_deferrals(held, number, 1, then.max_staleness)


def test_what_is_left_is_what_was_to_come_and_fewer_steps_or_passes_are_refused() -> None:
    ahead = Ahead(done=2, position=15, held=4, left_out=frozenset({3, 20}))
    assert ahead.given == 14 and ahead.limit(5, 5) == 14 + 3 * 5 - 4
    assert NEW_RUN.limit(5, 5) == 25 and NEW_RUN.limit(None, 5) is None
    assert Ahead(2, 14, 4).total_steps(None, 19, 5) == 4 and Ahead(2, 14, 4).total_steps(3, 19, 5) == 3, "held rollouts count"
    assert NEW_RUN.total_steps(None, 23, 5) == 5 and ahead.total_steps(None, 14 + 11, 5) == 5
    for steps, message in (None, None), (3, None), (4, None), (2, NO_STEPS):
        refused_by(message, require_resumable, 3, steps)
    for prompts, message in (None, None), (2 * 64, None), (3 * 64, None), (64, NO_PASSES):
        refused_by(message, require_prompts, Ahead(done=5, position=102, held=2), prompts, 64)
    for steps, prompts, message in (4, None, NO_WORK), (5, None, None), (None, 64, NO_WORK), (None, 128, None), (9, 64, NO_WORK):
        refused_by(message, ahead_module.require_work, Ahead(done=4, position=64), steps, prompts, 16)


NO_STEPS = r"steps is 2, but the checkpoint was saved after step 3.*set steps to 3"
NO_PASSES = r"comes to 1, but .* at prompt 102, in pass 2 over 64.*set epochs to 2"
NO_WORK = "ended after 4 steps, and with these settings there is nothing more"


def refused_by(message: str | None, check: Callable[..., None], *asked: Any) -> None:
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        check(*asked)


@pytest.mark.parametrize(
    ("deferrals", "batch_size", "needed"),
    [
        ([0] * 12, 4, None),
        ([0] * 12, 3, 4),  # three batches of 3, while none is carried more than twice, leave 3 behind
        ([0] * 13, 4, 5),
        ([2, 1, 1, 1, 1], 2, 3),  # what may be carried once more has two batches
        ([2, 2, 2, 0], 3, None),
        ([2, 2, 2, 0], 2, 3),  # three may not be deferred again
    ],
)
def test_a_batch_too_small_for_what_is_in_flight_is_refused(deferrals: list[int], batch_size: int, needed: int | None) -> None:
    message = needed and rf"resume with rollout.batch_size={needed} or more"
    refused_by(message, require_bounded_deferrals, deferrals, batch_size, 1, 2)


def test_the_last_of_each_group_is_greedy_and_groups_are_named_whole() -> None:
    """Greedy responses, which are not in a batch, go back with the others."""
    held = [Rollout(each, each.seq_id) for each in prompts(*range(18))]
    for trained in (1, 2, 5):
        members, size = Members(trained, greedy=True), trained + 1
        greedy = [each.seq_id for each in held if members.is_greedy(each.seq_id)]
        assert members.size == size and greedy == list(range(trained, 18, size))
        assert [each.seq_id for each in members.to_train(held)] == [i for i in range(18) if i not in greedy]
    for members in (ALONE, Members(2), Members(4)):
        assert members.to_train(held) is held and not any(members.is_greedy(i) for i in range(18))
    assert Members(2, greedy=True).of_groups([9, 10, 0, 1]) == [9, 10, 11, 0, 1, 2]
    assert Members(1, greedy=True).of_groups([4]) == [4, 5]
    assert Members(2).of_groups([4, 5]) == [4, 5] and ALONE.of_groups([3, 1]) == [3, 1]
