"""Properties of overcommitment over whole runs, driven by a tiny decode engine and checked against a naive model.
A token is a function of (seq_id, n) and lengths are given, so lost, repeated or misplaced tokens show."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.chunk_tuner import Occupancy
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Decision, Prompt, Rollout, StepSignals

CHUNKS = (1, 7, 64, 10**6)
NO_SIGNALS = StepSignals(0.0, 0.0, 1.0, 0.0)


@dataclass
class Deltas:
    deltas: list[int]
    num_steps: int = 0

    @property
    def value(self) -> int:
        return self.deltas[self.num_steps % len(self.deltas)]

    def observe(self, step: int, signals: StepSignals) -> Decision:
        self.num_steps += 1
        return Decision(self.value, f"script, step {step}", True)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@dataclass
class Run:
    """A run's plan: lengths, batch and group size, delta per step in groups, deferral cap, decode steps to a backfill."""

    lengths: list[int]
    batch_size: int
    deltas: list[int]
    max_staleness: int
    backfill_every: int | None = None
    group_size: int = 1


@dataclass
class Log:
    batches: list[list[Rollout]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    num_consumed: list[int] = field(default_factory=list)
    entered: dict[int, int] = field(default_factory=dict)  # clock of each admission, by sequence
    running: list[int] = field(default_factory=list)  # sequences that each decode step advances
    waste: list[float] = field(default_factory=list)  # of each step
    sure: list[list[set[int]]] = field(default_factory=list, compare=False)  # said before each round of each step


def token(seq_id: int, offset: int) -> int:
    return 1000 * seq_id + offset


def decode_round(buffer: RolloutBuffer, lengths: list[int], version: int, index: int, chunk_tokens: int, log: Log) -> Chunk:
    """One round: up to `chunk_tokens` decode steps, no step beyond the one that completes the batch."""
    readiness = buffer.readiness()
    rows = {r.seq_id: ChunkRow(r.seq_id, len(r.tokens), [], [], [], version) for r in buffer.active}
    running = list(rows)
    clock = buffer.clock
    end = clock + chunk_tokens
    while clock < end and not readiness.ready:
        clock += 1
        log.running.append(len(running))
        for seq_id in list(running):
            row = rows[seq_id]
            new = token(seq_id, row.offset + len(row.tokens))
            for values, value in (row.tokens, new), (row.logprobs, -float(new)), (row.sampling_logprobs, -0.5 * new):
                values.append(value)
            if row.offset + len(row.tokens) == lengths[seq_id]:
                row.finish_clock, row.finish_reason = clock, "eos"
                running.remove(seq_id)
                readiness.finish(seq_id)
    chunk = Chunk(index, clock, list(rows.values()))
    buffer.record(chunk)
    return chunk


def simulate(run: Run, chunk_tokens: int) -> Log:
    prompts = (Prompt(i, row=i, text="", tokens=(0,)) for i in range(len(run.lengths)))
    every, size = run.backfill_every, run.group_size
    buffer = RolloutBuffer(run.batch_size, run.deltas[0], run.max_staleness, backfill=every is not None, group_size=size)
    scheduler = OvercommitScheduler(prompts, buffer, Deltas(run.deltas), every)
    log, step, index = Log(), 0, 0
    while not scheduler.done:
        enter(scheduler, scheduler.begin_step, log, run)
        log.sizes.append(len(buffer))
        occupancy = Occupancy(buffer.clock)
        log.sure.append([])
        while not buffer.readiness().ready:
            enter(scheduler, scheduler.backfill, log, run)
            log.sure[-1].append(set(buffer.sure.tolist()))
            steps = scheduler.chunk(chunk_tokens)
            occupancy.record(decode_round(buffer, run.lengths, version=step, index=index, chunk_tokens=steps, log=log))
            index += 1
        log.sure[-1].append(set(buffer.sure.tolist()))
        log.waste.append(occupancy.tail_waste)
        log.num_consumed.append(scheduler.num_consumed)
        log.batches.append(scheduler.take_batch())
        log.clocks.append(buffer.clock)
        held = run.max_staleness * run.batch_size
        assert every is None or len(buffer) <= held, "a batch leaves behind what the next ones have room for"
        scheduler.end_step(step, NO_SIGNALS)
        step += 1
    return log


def enter(scheduler: OvercommitScheduler, admit: Callable[[], list[Rollout]], log: Log, run: Run) -> None:
    buffer = scheduler.buffer
    unfinished, held, capacity = len(buffer.active), len(buffer), buffer.capacity
    admitted = admit()
    log.entered |= {r.seq_id: buffer.clock for r in admitted}
    at_end = scheduler.num_consumed == len(run.lengths)
    if run.backfill_every is None:
        assert len(buffer) <= max(held, capacity)
        assert len(buffer) >= capacity or at_end
        return
    assert len(buffer.active) <= max(unfinished, capacity)
    most = max(2 * run.batch_size, min(capacity, (run.max_staleness + 1) * run.batch_size))
    assert len(buffer) <= max(held, most)
    assert not admitted or at_end or 0 <= min(capacity - len(buffer.active), most - len(buffer)) < run.group_size


def naive_batches(run: Run) -> list[list[tuple[int, int]]]:
    n, clock, held, batches = run.group_size, 0, dict[int, NaiveGroup](), list[list[tuple[int, int]]]()
    waiting = list(range(len(run.lengths) // n))
    while waiting or held:
        room = (run.batch_size // n + run.deltas[len(batches) % len(run.deltas)]) * n
        begun, enters = clock, True
        while True:
            while enters and waiting and naive_room(held, room, run):
                newest = waiting.pop(0)
                held[newest] = NaiveGroup(run.lengths[newest * n : (newest + 1) * n], [0] * n)
            size = run.batch_size // n if waiting else min(run.batch_size // n, len(held))
            if naive_ready(held, size, run):
                break
            clock += 1
            for group in held.values():
                group.advance(clock)
            enters = not naive_ready(held, size, run)
            enters = enters and run.backfill_every is not None and (clock - begun) % run.backfill_every == 0
        chosen = naive_choice(held, size, run)
        in_order = sorted(chosen, key=lambda g: (held[g].end, g))
        batches.append([(g * n + i, held[g].ends[i]) for g in in_order for i in range(n)])
        held = {g: group for g, group in held.items() if g not in chosen}
        for group in held.values():
            group.age += 1
    return batches


@dataclass
class NaiveGroup:
    """Tokens that each member still has to get, and the clock at which each ended."""

    left: list[int]
    ends: list[int]
    age: int = 0

    @property
    def ended(self) -> bool:
        return not any(self.left)

    @property
    def end(self) -> int:
        return max(self.ends)

    def advance(self, clock: int) -> None:
        for i, left in enumerate(self.left):
            if left:
                self.left[i], self.ends[i] = left - 1, clock


def naive_classes(held: dict[int, NaiveGroup], run: Run) -> list[tuple[list[int], int]]:
    members = [[g for g in held if held[g].age >= run.max_staleness - k] for k in range(run.max_staleness + 1)]
    return [(own, max(0, len(own) - k * run.batch_size // run.group_size)) for k, own in enumerate(members)]


def naive_ready(held: dict[int, NaiveGroup], size: int, run: Run) -> bool:
    enough = sum(group.ended for group in held.values()) >= size
    return enough and all(sum(held[g].ended for g in members) >= r for members, r in naive_classes(held, run))


def naive_choice(held: dict[int, NaiveGroup], size: int, run: Run) -> list[int]:
    """Choose from a ready batch: the oldest, then the first finishers of each class that needs more, then of all."""
    finishers = [g for _, g in sorted((held[g].end, g) for g in held if held[g].ended)]
    chosen: list[int] = []
    for members, needed in [*naive_classes(held, run), (list(held), size)]:
        if members == naive_classes(held, run)[0][0] and not chosen:
            chosen = members[:size]
        for g in finishers:
            if g in members and g not in chosen and sum(c in members for c in chosen) < needed and len(chosen) < size:
                chosen.append(g)
    return chosen


def naive_room(held: dict[int, NaiveGroup], capacity: int, run: Run) -> bool:
    n = run.group_size
    if run.backfill_every is None:
        return len(held) * n + n <= capacity
    running = sum(left > 0 for group in held.values() for left in group.left)
    most = max(2 * run.batch_size, min(capacity, (run.max_staleness + 1) * run.batch_size))
    return running + n <= capacity and (len(held) + 1) * n <= most


@st.composite
def runs(draw: st.DrawFn) -> Run:
    group_size = draw(st.sampled_from([1, 1, 2, 3]))
    groups, staleness = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    longest = st.one_of(st.integers(1, 4), st.integers(1, 12), st.integers(20, 150))
    lengths = draw(st.lists(longest, max_size=40).map(lambda lengths: lengths[: len(lengths) // group_size * group_size]))
    deltas = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    return Run(lengths, groups * group_size, deltas, staleness, draw(st.none() | st.integers(1, 9)), group_size)


@given(run=runs(), chunk_tokens=st.sampled_from(CHUNKS))
@settings(max_examples=300)
def test_whole_runs(run: Run, chunk_tokens: int) -> None:
    log = simulate(run, chunk_tokens)
    assert [[(r.seq_id, r.finish_clock) for r in batch] for batch in log.batches] == naive_batches(run)
    assert log == simulate(run, max(CHUNKS)), "the size of a chunk changes nothing"
    trained = [r for batch in log.batches for r in batch]
    assert sorted(r.seq_id for r in trained) == list(range(len(run.lengths)))
    assert all(len(batch) == run.batch_size for batch in log.batches[:-1]) and all(log.batches)
    for rollout in trained:
        tokens = [token(rollout.seq_id, n) for n in range(run.lengths[rollout.seq_id])]
        assert (rollout.tokens, rollout.finish_reason) == (tokens, "eos")
        assert rollout.logprobs == [-float(t) for t in tokens]
        assert rollout.sampling_logprobs == [-0.5 * t for t in tokens] and rollout.finish_clock is not None
        first_clock = rollout.finish_clock - len(tokens) + 1  # a rollout decodes one token per clock from its admission on
        expected = [next(s for s, end in enumerate(log.clocks) if c <= end) for c in range(first_clock, rollout.finish_clock + 1)]
        assert rollout.versions == expected
    # They count the batches since admission, within the cap if delta is, and with backfill for any delta
    bounded = run.backfill_every is not None or max(run.deltas) * run.group_size <= run.max_staleness * run.batch_size
    for step, batch in enumerate(log.batches):
        for rollout in batch:
            assert rollout.deferrals <= run.max_staleness or not bounded
            assert rollout.deferrals == step - next(i for i, n in enumerate(log.num_consumed) if n > rollout.admission)
    for batch, rounds in zip(log.batches, log.sure, strict=True):
        trained = {r.seq_id for r in batch}
        assert all(before <= after for before, after in itertools.pairwise(rounds)), "what was sure stays so"
        assert rounds[-1] == trained
        if run.deltas == [0] and run.backfill_every is None:
            assert all(sure == trained for sure in rounds), "without overcommitment every rollout is sure from the start"
    check_waste(log)
    if run.backfill_every is not None:
        check_admissions(run, log)


def check_waste(log: Log) -> None:
    for begun, ended, waste in zip([0, *log.clocks], log.clocks, log.waste, strict=False):
        running = log.running[begun:ended]
        width = max(running, default=0)
        assert waste == pytest.approx(fmean(1 - count / width for count in running) if running else 0.0, abs=1e-12)


def check_admissions(run: Run, log: Log) -> None:
    assert list(log.entered) == list(range(len(run.lengths)))
    begun = [0, *log.clocks[:-1]]
    for clock in log.entered.values():
        assert (clock - begun[max(i for i, start in enumerate(begun) if start <= clock)]) % run.backfill_every == 0


def test_backfill_keeps_the_decode_batch_full_and_the_cap_is_needed_and_binds() -> None:
    """Lengths of 1 to 100: without backfill a step's places empty until half of them are left."""
    rng = random.Random(3)
    run = Run([rng.randint(1, 100) for _ in range(400)], batch_size=20, deltas=[4], max_staleness=4)
    means = {}
    for every in (None, 1, 4, 16):
        log = simulate(replace(run, backfill_every=every), 16)
        means[every] = fmean(log.running[: len(log.running) * 3 // 4])  # the data end with fewer to decode
    assert max(means.values()) <= 24
    assert means[None] < 17 and means[1] > 23.5 and means[1] >= means[4] >= means[16] > means[None] + 2
    # One endless response among short ones is deferred exactly `max_staleness` times, then holds its batch up
    log = simulate(Run(lengths=[60, *[1] * 30], batch_size=2, deltas=[1], max_staleness=3), 7)
    straggler = next(r for batch in log.batches for r in batch if r.seq_id == 0)
    assert (straggler.deferrals, straggler.finish_clock) == (3, 60) and any(straggler is r for r in log.batches[3])


@pytest.mark.parametrize("num_prompts", [0, 1, 4, 5, 6, 12])
def test_the_end_is_known_without_an_empty_step(num_prompts: int) -> None:
    log = simulate(Run([3] * num_prompts, batch_size=4, deltas=[2], max_staleness=2), 2)
    assert [len(batch) for batch in log.batches] == [4] * (num_prompts // 4) + [num_prompts % 4] * (num_prompts % 4 > 0)


def test_the_controller_sets_the_buffer_from_the_start_and_after_each_step() -> None:
    controller = make_delta_controller(DeltaConfig(rule="eq4", initial=2, max=3, window=1))
    buffer = RolloutBuffer(batch_size=4, delta=0, max_staleness=2)
    scheduler = OvercommitScheduler((Prompt(i, row=i, text="", tokens=(0,)) for i in range(100)), buffer, controller)
    assert len(scheduler.begin_step()) == 6
    for step, (reward, delta) in enumerate([(0.0, 2), (1.0, 3), (2.0, 3), (1.0, 2)]):
        assert scheduler.end_step(step, StepSignals(reward, 0.0, 1.0, 0.0)).value == buffer.delta == delta
    assert scheduler.num_consumed == 6


@pytest.mark.parametrize("block", range(10))
def test_continuous_batches_are_bounded_in_staleness_and_lose_nothing(block: int) -> None:
    """100 random runs each: batches are trained late, one at a time, and prompts admitted when weights are installed."""
    for number in range(100 * block, 100 * (block + 1)):
        choose = random.Random(number)
        size, groups, most = choose.choice([1, 2, 3]), choose.choice([1, 3, 8]), choose.choice([1, 2, 3, 5])
        count = groups * choose.randrange(2, 7) + choose.randrange(groups)
        lengths = [min(200, int(choose.paretovariate(0.9))) for _ in range(count * size)]
        deltas = [choose.randrange(most * groups + 1) for _ in range(5)] if choose.random() < 0.3 else [most * groups]
        queue_size = choose.choice([None, None, groups, 2 * groups])
        buffer = RolloutBuffer(groups * size, 0, most, group_size=size, queue_size=queue_size)
        scheduler = OvercommitScheduler(iter([Prompt(i, i, "", (1,)) for i in range(count * size)]), buffer, Deltas(deltas))
        made, taken, queue, log = 0, 0, list[tuple[int, int]](), Log()
        heads = {rollout.seq_id: 0 for rollout in scheduler.begin_step()}
        lag, trained, rounds = choose.randrange(40), list[int](), 0
        while not (scheduler.done and not queue):
            rounds += 1
            assert rounds < 10_000, f"run {number} does not end"
            if len(buffer) and buffer.readiness().ready:
                batch = scheduler.take_batch()
                ages = [taken - heads[rollout.seq_id] for rollout in batch]
                assert max(ages) <= most and ages == [rollout.deferrals for rollout in batch], number
                trained += [rollout.seq_id for rollout in batch]
                queue.append((taken, buffer.clock))
                taken += 1
            elif queue and (not buffer.active or buffer.clock >= queue[0][1] + lag):
                made = queue.pop(0)[0] + 1
                scheduler.end_step(made, NO_SIGNALS)
                new = scheduler.begin_step()
                assert len(buffer) + (taken - made) * groups * size <= (groups + buffer.delta) * size or not new
                heads |= {rollout.seq_id: made for rollout in new}
            else:
                left = queue[0][1] + lag - buffer.clock if queue else 10**6
                decode_round(buffer, lengths, made, rounds, min(choose.randrange(1, 30), left), log)
        assert sorted(trained) == list(range(count * size)), "each prompt is trained once"
