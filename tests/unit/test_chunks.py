"""A chunk's rows in columns say what the rows say, one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import REASONS, ChunkRow, ChunkRows
from oppo_megatron.engine.stream import from_words, to_words
from oppo_megatron.errors import StreamError


def rows_of(rng: random.Random, ids: list[int]) -> list[ChunkRow]:
    made = []
    for seq_id in ids:
        tokens = [rng.randrange(2**31) for _ in range(rng.randint(0, 4))]
        logprobs, sampling = ([-rng.random() for _ in tokens] for _ in range(2))
        finish = (rng.randint(0, 99), rng.choice(REASONS[1:])) if rng.random() < 0.5 else (None, None)
        made.append(ChunkRow(seq_id, rng.randint(0, 50), tokens, logprobs, sampling, rng.randint(0, 9), *finish))
    return made


def cut(row: ChunkRow, keep: int) -> ChunkRow:
    if len(row.tokens) <= keep:
        return row
    shorter = row.tokens[:keep], row.logprobs[:keep], row.sampling_logprobs[:keep]
    return ChunkRow(row.seq_id, row.offset, *shorter, row.version)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), ids=st.lists(st.integers(0, 30), max_size=9, unique=True), keep=st.integers(0, 4))
def test_columns_are_rows(seed: int, ids: list[int], keep: int) -> None:
    rng = random.Random(seed)
    plain = rows_of(rng, ids)
    rows = ChunkRows.of(plain)
    assert list(rows) == plain and ChunkRows.of(rows) is rows and rows.num_tokens == sum(len(r.tokens) for r in plain)
    chosen = rng.sample(range(len(plain)), rng.randint(0, len(plain)))
    plain, rows = [cut(plain[i], keep) for i in chosen], rows.at(chosen).cut(keep)
    assert list(rows) == plain
    sent = from_words(to_words(rows))
    assert list(sent) == plain and sent.body.shape[1] == rows.num_tokens, "nothing is sent but the rows' tokens"
    others = rows_of(rng, [100, 101])
    joined = ChunkRows.joined([rows, ChunkRows.of(others), sent])
    assert list(joined) == [*plain, *others, *plain]
    assert list(joined.at(np.flatnonzero(np.isin(joined.seq_ids, rows.seq_ids)))) == [*plain, *plain]
    for seq_id in range(31):
        place = rows.place(seq_id)
        assert (None if place is None else rows[place]) == next((r for r in plain if r.seq_id == seq_id), None)


def test_a_token_without_a_log_prob_is_an_error() -> None:
    whole = ChunkRow(0, 2, [1], [-1.0], [-1.0], 0)
    for logprobs, sampling_logprobs, message in (
        ([-1.0], [-1.0, -1.0], "sequence 1, offset 2: 2 tokens come with 1 log-probs and 2 sampling"),
        ([-1.0, -1.0], [], "sequence 1, offset 2: 2 tokens come with 2 log-probs and 0 sampling"),
    ):
        with pytest.raises(StreamError, match=message):
            ChunkRows.of([whole, ChunkRow(1, 2, [1, 1], logprobs, sampling_logprobs, 0)])
