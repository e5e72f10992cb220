"""The rollout buffer by hand-made cases: choice of the batch, deferral, draining, readiness, refused chunks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.errors import StreamError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.readiness import Readiness, settled
from oppo_megatron.records import Prompt, Rollout


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


def test_admission_numbers_count_on_over_batches() -> None:
    buffer = RolloutBuffer(batch_size=2, delta=1, max_staleness=4)
    assert [r.admission for r in buffer.admit(prompts(7, 5, 9))] == [0, 1, 2]
    buffer.record(Chunk(0, 1, [row(9, 0, [1], 1), row(7, 0, [1], 1)]))
    buffer.take_batch()
    assert [r.admission for r in buffer.admit(prompts(2, 3))] == [3, 4]
    assert seq_ids(buffer.rollouts) == [5, 2, 3]


def test_admission_beyond_capacity_is_our_own_bug() -> None:
    buffer = RolloutBuffer(batch_size=2, delta=1, max_staleness=4)
    with pytest.raises(AssertionError, match="4 prompts admitted into room for 3"):
        buffer.admit(prompts(0, 1, 2, 3))
    buffer.admit(prompts(0))
    with pytest.raises(AssertionError, match="already in the buffer"):
        buffer.admit(prompts(0))


def test_no_admission_after_the_end() -> None:
    buffer = RolloutBuffer(batch_size=2, delta=1, max_staleness=4)
    buffer.close()
    assert buffer.admit([]) == []
    with pytest.raises(AssertionError, match="after the end"):
        buffer.admit(prompts(0))


def test_more_due_rollouts_than_a_batch_holds_go_oldest_first() -> None:
    """Settings were changed within a run: with B 1 and η 1 no more than two should be held."""
    buffer = filled(1, 3, max_staleness=1)
    buffer.record(Chunk(0, 1, [row(0, 0, [1], 1)]))
    assert not buffer.readiness().ready, "three of the four have to be finished, so that one is left that falls due"
    buffer.record(Chunk(1, 4, [row(3, 0, [1], 2), row(2, 0, [1], 3)]))
    assert seq_ids(buffer.take_batch()) == [0]
    assert not buffer.readiness().ready
    buffer.record(Chunk(2, 5, [row(1, 0, [1], 5)]))
    assert [seq_ids(buffer.take_batch()) for _ in range(3)] == [[1], [2], [3]]


def test_only_the_end_of_the_prompts_allows_a_smaller_batch() -> None:
    buffer = RolloutBuffer(batch_size=4, delta=0, max_staleness=4)
    buffer.admit(prompts(0, 1))
    buffer.record(Chunk(0, 1, [row(0, 0, [1], 1), row(1, 0, [1], 1)]))
    assert not buffer.readiness().ready
    with pytest.raises(AssertionError, match="before the batch is ready"):
        buffer.take_batch()
    buffer.close()
    assert seq_ids(buffer.take_batch()) == [0, 1]


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
    assert buffer.rollouts == before
    assert buffer.clock == 6


def test_the_critic_reads_what_is_worth_it() -> None:
    buffer = filled(batch_size=4, delta=2)  # of six unfinished, four will be in the batch

    def worth() -> set[int]:
        return set(buffer.worth_reading().tolist())

    everything = set(range(6))
    assert worth() == everything
    buffer.record(Chunk(0, 2, [row(0, 0, [1, 1], 2), row(3, 0, [1, 1], 1)]))
    assert worth() == everything, "two of four unfinished will be in it"
    buffer.record(Chunk(1, 3, [row(1, 0, [1], 3)]))
    assert worth() == {0, 1, 3}, "one of three will be"
    buffer.record(Chunk(2, 4, [row(4, 0, [1], 4), row(5, 0, [1], 4)]))
    assert worth() == {0, 1, 3, 4}, "the fifth finisher is left for the next batch"


def test_deferrals_are_taken_up_with_the_rollouts_of_a_checkpoint() -> None:
    buffer = filled(1, 1, max_staleness=1)
    buffer.record(Chunk(0, 1, [row(0, 0, [1], 1), row(1, 0, [1])]))
    assert seq_ids(buffer.take_batch()) == [0]
    resumed = RolloutBuffer(1, 1, 1)
    resumed.load_state_dict(buffer.state_dict(), copy.deepcopy(list(buffer.rollouts)))
    resumed.admit(prompts(2))
    resumed.record(Chunk(1, 2, [row(2, 0, [1], 2), row(1, 1, [1])]))
    assert not resumed.readiness().ready, "a rollout that was deferred as often as it may be is waited for"


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
    found = settled(np.array(finished, dtype=np.bool_), np.array(clocks), np.array(ages), batch, most, target)
    assert found.tolist() == sorted(chosen)[:target]
