"""A run that goes on with other `steps`, another batch size, delta or cap of deferrals: its steps are the ones asked for, every
batch has its size and no rollout waits longer than it may, or it is refused with a remedy that holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError
from oppo_megatron.overcommit.ahead import (
    NEW_RUN,
    Ahead,
    require_bounded_deferrals,
    require_prompts,
    require_resumable,
    require_work,
)
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Rollout
from tests.unit.test_data_prompts import plain_set
from tests.unit.test_overcommit_simulation import NO_SIGNALS, Deltas, Log, decode_round


@dataclass
class Settings:
    steps: int
    batch_size: int
    deltas: list[int]
    max_staleness: int
    backfill_every: int | None


class Run:
    """The product's stream, buffer and scheduler, around a decode engine of which only lengths matter."""

    def __init__(self, prompts: PromptSet, plan: Settings, lengths: list[int], ahead: Ahead = NEW_RUN):
        limit = ahead.limit(plan.steps, plan.batch_size)
        stream = PromptStream(prompts, 1, limit=limit, start=ahead.position, left_out=ahead.left_out)
        self.buffer = RolloutBuffer(plan.batch_size, plan.deltas[0], plan.max_staleness, backfill=plan.backfill_every is not None)
        self.scheduler = OvercommitScheduler(stream, self.buffer, Deltas(plan.deltas), plan.backfill_every)
        self.plan, self.lengths, self.done, self.batches, self.rounds = plan, lengths, ahead.done, [], 0

    def step(self, *, rounds: int | None = None) -> bool:
        """A step of rounds of three decode steps; False where it is left after so many `rounds`."""
        self.scheduler.begin_step()
        return self.finish(rounds)

    def finish(self, rounds: int | None = None) -> bool:
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

    def resumed(self, prompts: PromptSet, plan: Settings) -> Run:
        held = self.buffer.rollouts
        ahead = Ahead(self.done, self.scheduler.position, len(held))
        require_resumable(self.done, plan.steps)
        if self.done != plan.steps:
            require_bounded_deferrals([each.deferrals for each in held], plan.batch_size, 1, plan.max_staleness)
        run = Run(prompts, plan, self.lengths, ahead)
        run.scheduler.load_state_dict(self.scheduler.state_dict(), held)
        return run


@st.composite
def plans(draw: st.DrawFn, most: int) -> Settings:
    batch_size = draw(st.integers(1, 6))
    staleness = draw(st.integers(1, 3))
    deltas = draw(st.lists(st.integers(0, staleness * batch_size), min_size=1, max_size=4))
    every = draw(st.none() | st.integers(1, 5))
    return Settings(draw(st.integers(1, most)), batch_size, deltas, staleness, every)


@given(first=plans(4), then=plans(7), after=st.integers(0, 4), rounds=st.none() | st.integers(0, 4), data=st.data())
@settings(deadline=None, max_examples=300)
def test_a_resumed_run_makes_the_steps_that_are_asked_for(
    first: Settings, then: Settings, after: int, rounds: int | None, data: st.DataObject
) -> None:
    prompts = plain_set(150)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=150, max_size=150))
    run = Run(prompts, first, lengths)
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
        assert resumed.finish()
    while resumed.done < then.steps:
        assert not resumed.scheduler.done, "the prompts ended before the steps"
        assert resumed.step()
    assert all(len(batch) == then.batch_size for batch in resumed.batches)
    assert len(resumed.batches) == then.steps - done
    assert all(each.deferrals <= then.max_staleness for batch in resumed.batches for each in batch)
    assert_each_prompt_once([*run.batches, *resumed.batches], resumed.buffer.rollouts)
    if (then.steps - done) * then.batch_size >= len(held):
        assert resumed.scheduler.done, "a prompt was admitted that is not trained"


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


def assert_each_prompt_once(batches: list[list[Rollout]], left: list[Rollout]) -> None:
    taken = [each.seq_id for batch in batches for each in batch] + [each.seq_id for each in left]
    assert sorted(taken) == list(range(len(taken)))


def test_what_is_left_of_an_unchanged_run_is_what_was_to_come() -> None:
    ahead = Ahead(done=2, position=15, held=4, left_out=frozenset({3, 20}))
    assert ahead.given == 14 and ahead.limit(5, 5) == 14 + 3 * 5 - 4
    assert NEW_RUN.limit(5, 5) == 25 and NEW_RUN.limit(None, 5) is None
    assert Ahead(2, 14, 4).total_steps(None, 19, 5) == 4 and Ahead(2, 14, 4).total_steps(3, 19, 5) == 3, "held rollouts count"
    assert NEW_RUN.total_steps(None, 23, 5) == 5 and ahead.total_steps(None, 14 + 11, 5) == 5


NO_STEPS = r"steps is 2, but the checkpoint was saved after step 3.*set steps to 3"
NO_PASSES = r"comes to 1, but .* at prompt 102, in pass 2 over 64.*set epochs to 2"
NO_WORK = "ended after 4 steps, and with these settings there is nothing more"


def refused_by(check: Callable[[], None], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        check()


@pytest.mark.parametrize(("steps", "message"), [(None, None), (3, None), (4, None), (2, NO_STEPS)])
def test_fewer_steps_than_are_done_are_refused(steps: int | None, message: str | None) -> None:
    refused_by(lambda: require_resumable(3, steps), message)


@pytest.mark.parametrize(("passes", "message"), [(None, None), (2, None), (3, None), (1, NO_PASSES)])
def test_fewer_passes_than_have_begun_are_refused(passes: int | None, message: str | None) -> None:
    ahead, most = Ahead(done=5, position=102, held=2), None if passes is None else passes * 64
    refused_by(lambda: require_prompts(ahead, most, 64), message)


@pytest.mark.parametrize(
    ("steps", "passes", "message"), [(4, None, NO_WORK), (5, None, None), (None, 1, NO_WORK), (None, 2, None), (9, 1, NO_WORK)]
)
def test_a_run_that_has_ended_needs_more_to_train(steps: int | None, passes: int | None, message: str | None) -> None:
    ahead, most = Ahead(done=4, position=64), None if passes is None else passes * 64
    refused_by(lambda: require_work(ahead, steps, most, 16), message)


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
    refused_by(lambda: require_bounded_deferrals(deferrals, batch_size, 1, max_staleness=2), message)
