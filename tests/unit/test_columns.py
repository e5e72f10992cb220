"""Rollouts in columns are what the rollouts say, also where these have grown or left since."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.columns import Columns, Held, Table
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt, Rollout


def same(found: Columns, expected: Columns) -> bool:
    return all((a == b).all() and len(a) == len(b) for a, b in zip(found, expected, strict=True))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), backfill=st.booleans())
def test_columns_follow_the_rollouts(seed: int, backfill: bool) -> None:
    rng, buffer = random.Random(seed), RolloutBuffer(4, 3, 2, backfill=backfill)
    taken: list[Held] = []
    next_id = 0
    for index in range(12):
        if rng.random() < 0.7:
            ids = range(next_id, next_id + rng.randint(0, buffer.room))
            buffer.admit(Prompt(i, i, "", (1,) * rng.randint(1, 5)) for i in ids)
            next_id = ids.stop
        taken += [buffer.rollouts, buffer.active]
        assert all(held.by_id[own.seq_id] is own for held in taken[-2:] for own in held)
        assert list(taken[-1]) == [r for r in buffer.rollouts if not r.finished]
        rows = []
        for own in buffer.active:
            tokens = [7] * rng.randint(0, 3)
            ends = bool(tokens) and rng.random() < 0.3
            row = ChunkRow(own.seq_id, own.num_response_tokens, tokens, [0.0] * len(tokens), [0.0] * len(tokens), index)
            row.finish_clock, row.finish_reason = (buffer.clock + len(tokens), "eos") if ends else (None, None)
            rows.append(row)
        buffer.record(Chunk(index, buffer.clock + 3, rows))
        if buffer.readiness().ready:
            taken.append(buffer.take_batch())
        for held in taken:
            assert same(held.columns(), Columns.of(held))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), backfill=st.booleans())
def test_tokens_are_there_whenever_they_are_read(seed: int, backfill: bool) -> None:
    rng, buffer = random.Random(seed), RolloutBuffer(4, 3, 4, backfill=backfill)
    said, known, next_id = dict[int, list[int]](), dict[int, Rollout](), 0
    for index in range(20):
        ids = range(next_id, next_id + rng.randint(0, buffer.room))
        known |= {own.seq_id: own for own in buffer.admit(Prompt(i, i, "", (1,)) for i in ids)}
        next_id = ids.stop
        rows = []
        for own in rng.sample(buffer.active, rng.randint(0, len(buffer.active))):
            before = said.setdefault(own.seq_id, [])
            tokens = [rng.randrange(9) for _ in range(rng.randint(1, 3))]
            finish = (buffer.clock + len(tokens), "eos") if rng.random() < 0.3 else (None, None)
            numbers = [-token / 7 for token in tokens]
            rows.append(ChunkRow(own.seq_id, len(before), tokens, numbers, numbers, index, *finish))
            said[own.seq_id] = before + tokens
        buffer.record(Chunk(index, buffer.clock + 3, rows))
        if buffer.readiness().ready:
            buffer.take_batch()
        for own in rng.sample(sorted(known.values(), key=lambda r: r.seq_id), rng.randint(0, len(known))):
            assert own.num_response_tokens == len(said.get(own.seq_id, []))
            assert own.tokens == said.get(own.seq_id, []) and own.logprobs == [-token / 7 for token in own.tokens]
    assert all(own.tokens == said.get(seq_id, []) for seq_id, own in known.items())


def test_what_is_recorded_is_joined_when_it_is_read() -> None:
    """Keeps the order of recording; a rollout that was read equals one that was not."""
    rollouts = [Rollout(Prompt(0, 0, "", (1, 2)), 0, [5], [0.5], [0.25], [3]) for _ in range(2)]
    for own in rollouts:
        own.extend(ChunkRow(0, 1, [6, 7], [1.0, 2.0], [1.5, 2.5], 4))
        own.extend(ChunkRow(0, 3, [], [], [], 9, 12, "length"))
    read, unread = rollouts
    assert (read.num_response_tokens, read.num_tokens) == (3, 5)
    assert read.tokens == [5, 6, 7] and read.versions == [3, 4, 4]
    assert read.logprobs == [0.5, 1.0, 2.0] and read.sampling_logprobs == [0.25, 1.5, 2.5]
    assert read.num_response_tokens == 3 and (read.finish_clock, read.finished) == (12, True)
    assert read == unread and unread != Rollout(Prompt(0, 0, "", (1, 2)), 0)


def test_lists_may_be_set_and_added_to() -> None:
    own = Rollout(Prompt(0, 0, "", (1,)), 0)
    own.extend(ChunkRow(0, 0, [6], [1.0], [1.5], 4))
    own.tokens.extend([7])
    own.logprobs.extend([2.0])
    own.sampling_logprobs.extend([2.5])
    own.versions.extend([5])
    own.extend(ChunkRow(0, 2, [8], [3.0], [3.5], 6))
    assert (own.tokens, own.logprobs, own.sampling_logprobs, own.versions) == (
        [6, 7, 8], [1.0, 2.0, 3.0], [1.5, 2.5, 3.5], [4, 5, 6],
    )  # fmt: skip
    own.tokens[:], own.logprobs[:], own.sampling_logprobs[:], own.versions[:] = [1], [0.1], [0.2], [2]
    assert own.num_tokens == 2 and own.logprobs + own.sampling_logprobs == [0.1, 0.2]


@given(held=st.lists(st.integers(5, 40), unique=True), asked=st.lists(st.integers(0, 50)), data=st.data())
def test_a_table_finds_sequences_by_number(held: list[int], asked: list[int], data: st.DataObject) -> None:
    table = Table()
    table.add([Rollout(Prompt(seq_id, seq_id, "", (1,)), 0) for seq_id in held])
    wanted = np.array(asked, dtype=np.int64)
    assert table.rows(wanted).tolist() == [held.index(i) if i in held else -1 for i in asked]
    kept = data.draw(st.lists(st.booleans(), min_size=len(held), max_size=len(held)))
    table.keep(np.array(kept, dtype=np.bool_))
    left = [seq_id for seq_id, stays in zip(held, kept, strict=True) if stays]
    assert table.rows(wanted).tolist() == [left.index(i) if i in left else -1 for i in asked]
