"""Packed micro-batches: every response token is predicted once, from the position before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.mcore.batch import MicroBatch, join_rows, pack_responses, split_rows

CPU = torch.device("cpu")
TOKENS = st.lists(st.integers(0, 500), min_size=1, max_size=6)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8), budget=st.integers(1, 30))
def test_rows_predict_each_response_token_from_its_own_prefix(pairs: list[tuple[list[int], list[int]]], budget: int) -> None:
    batches = pack_responses([p for p, _ in pairs], [r for _, r in pairs], budget, CPU)
    found: dict[tuple[int, int], tuple[list[int], int]] = {}
    for batch in batches:
        assert len(batch.tokens_T) == sum(batch.lengths)
        assert len(batch.tokens_T) <= budget or len(batch.index) == 1
        starts = [sum(batch.lengths[:k]) for k in range(len(batch.lengths))]
        for row, target in zip(batch.rows_R.tolist(), batch.targets_R.tolist(), strict=True):
            place = max(k for k, start in enumerate(starts) if start <= row)
            prefix = batch.tokens_T[starts[place] : row + 1].tolist()
            found[batch.index[place], len(prefix)] = (prefix, target)
    expected = {
        (i, len(prompt) + t): (prompt + response[:t], response[t])
        for i, (prompt, response) in enumerate(pairs)
        for t in range(len(response))
    }
    assert found == expected


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), budget=st.integers(1, 20))
def test_join_inverts_split(lengths: list[int], budget: int) -> None:
    batches = pack_responses([[1]] * len(lengths), [[2] * n for n in lengths], budget, CPU)
    values_T = torch.arange(sum(lengths), dtype=torch.float32)
    pieces = split_rows(values_T, lengths, batches)
    assert [len(p) for p in pieces] == [len(b.rows_R) for b in batches]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert pieces[0].tolist() == [float(starts[i] + t) for i in batches[0].index for t in range(lengths[i])]
    assert torch.equal(join_rows(pieces, lengths, batches), values_T)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), more=st.integers(0, 30), longest=st.integers(1, 9))
def test_padding_is_sequences_behind_the_batch(lengths: list[int], more: int, longest: int) -> None:
    (batch,) = pack_responses([[7]] * len(lengths), [[5] * n for n in lengths], 1000, CPU)
    num_tokens = sum(lengths)
    padded_lengths, tokens_T = batch.padded(num_tokens + more, longest)
    assert padded_lengths[: len(lengths)] == batch.lengths and sum(padded_lengths) == len(tokens_T) == num_tokens + more
    assert all(1 <= n <= longest for n in padded_lengths[len(lengths) :])
    assert torch.equal(tokens_T[:num_tokens], batch.tokens_T) and not tokens_T[num_tokens:].any()
    assert int(batch.rows_R.max()) < num_tokens, "no row looks at the padding"


def test_a_dummy_belongs_to_no_sequence_and_tokens_that_do_not_fit_are_our_own_bug() -> None:
    dummy, (batch,) = MicroBatch.dummy(CPU), pack_responses([[1, 2]], [[3, 4]], 10, CPU)
    assert dummy.is_dummy and len(dummy.tokens_T) == sum(dummy.lengths) == 1 and dummy.rows_R.tolist() == [0]
    assert not batch.is_dummy
    with pytest.raises(AssertionError, match="3 tokens do not fit into 2"):
        batch.padded(2, 8)
