"""Chunks on the wire: what is sent is what arrives, and whatever else arrives is an error that says where."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.engine.stream import ChunkDecoder, ChunkEncoder
from oppo_megatron.errors import StreamError

PROMPTS = {7: (1, 2, 3), 12: (9,), 30: (4, 4)}
FLOAT = st.floats(allow_nan=False, max_value=0.0)


def ends() -> tuple[ChunkEncoder, ChunkDecoder]:
    encoder, decoder = ChunkEncoder(), ChunkDecoder()
    for seq_id, prompt in PROMPTS.items():
        encoder.open(seq_id, prompt)
        decoder.open(seq_id, prompt)
    return encoder, decoder


def row(seq_id: int, offset: int, tokens: list[int], version: int = 3, **finish: object) -> ChunkRow:
    logprobs = [-0.5 - 0.25 * t for t in tokens]
    return ChunkRow(seq_id, offset, tokens, logprobs, [x / 2 for x in logprobs], version, **finish)


def messages() -> list[Chunk]:
    return [
        Chunk(0, 2, [row(7, 0, [5, 6]), row(12, 0, [8, 1], finish_clock=2, finish_reason="eos")]),
        Chunk(1, 4, [row(7, 2, [7, 9]), row(30, 0, [2])]),
        Chunk(2, 6, [row(30, 1, [1, 3], finish_clock=6, finish_reason="length"), row(7, 4, [1])]),
    ]


def receive(decoder: ChunkDecoder, message: tuple[np.ndarray, np.ndarray]) -> Chunk:
    header, payload = message
    assert decoder.payload_size(header) == len(payload)
    return decoder.decode(header, payload)


@st.composite
def streams(draw: st.DrawFn) -> list[Chunk]:
    offsets, chunks, clock = dict.fromkeys(PROMPTS, 0), [], 0
    for index in range(draw(st.integers(1, 5))):
        clock += draw(st.integers(0, 9))
        rows = []
        for seq_id in draw(st.permutations(sorted(offsets)).map(lambda ids: ids[: draw(st.integers(0, len(ids)))])):
            count = draw(st.integers(0, 4))
            floats = st.lists(FLOAT, min_size=count, max_size=count)
            tokens = draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count))
            reason = draw(st.sampled_from([None, None, "eos", "length"]))
            finish = (None, None) if reason is None else (clock, reason)
            version = draw(st.integers(0, 99))
            rows.append(ChunkRow(seq_id, offsets[seq_id], tokens, draw(floats), draw(floats), version, *finish))
            offsets[seq_id] += count
            if reason:
                del offsets[seq_id]
        chunks.append(Chunk(index, clock, rows))
    return chunks


@settings(deadline=None)
@given(streams())
def test_what_is_sent_arrives(chunks: list[Chunk]) -> None:
    encoder, decoder = ends()
    assert [receive(decoder, encoder.encode(chunk)) for chunk in chunks] == chunks


def test_every_bit_of_a_log_prob_arrives() -> None:
    encoder, decoder = ends()
    values = [-0.1, -5e-324, -math.inf, -0.0]
    sent = Chunk(0, 4, [ChunkRow(7, 0, [1, 2, 3, 4], values, values[::-1], 0)])
    got = receive(decoder, encoder.encode(sent)).rows[0]
    assert np.array(got.logprobs).tobytes() == np.array(values).tobytes()
    assert np.array(got.sampling_logprobs).tobytes() == np.array(values[::-1]).tobytes()


@pytest.mark.parametrize("bit", [0, 1, 31, 40, 63])
def test_each_flipped_word_is_an_error(bit: int) -> None:
    sent = messages()
    encoder, _ = ends()
    wire = [encoder.encode(chunk) for chunk in sent]
    num_words = [len(wire[1][0]), len(wire[1][1])]
    for part in (0, 1):
        for word in range(num_words[part]):
            _, decoder = ends()
            receive(decoder, wire[0])
            bad = [wire[1][0].copy(), wire[1][1].copy()]
            bad[part].view(np.uint64)[word] ^= np.uint64(1 << bit)
            with pytest.raises(StreamError) as caught:
                decoder.payload_size(bad[0])
                decoder.decode(*bad)
            if part == 1:
                assert re.search(r"sequence -?\d+, offset -?\d+", str(caught.value))


def test_a_corrupted_token_names_its_sequence_and_offset() -> None:
    encoder, decoder = ends()
    first, second, _ = (encoder.encode(chunk) for chunk in messages())
    receive(decoder, first)
    tokens = 2 * 7  # the tokens follow two rows of seven words
    second[1][tokens + 2] += 1  # the only token of the second row
    with pytest.raises(StreamError, match=r"sequence 30, offset 0 .*corrupted"):
        receive(decoder, second)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([0, 2], "lost.*message 2 came, but 1 was due.*sequence 7 at offset 2"),
        ([0, 0], "repeated.*message 0 came, but 1 was due.*sequence 7 at offset 2"),
        ([1], "message 1 came, but 0 was due"),
    ],
    ids=["lost", "repeated", "reordered"],
)
def test_a_message_out_of_order_is_an_error(order: list[int], says: str) -> None:
    encoder, decoder = ends()
    wire = [encoder.encode(chunk) for chunk in messages()]
    *before, last = order
    for index in before:
        receive(decoder, wire[index])
    with pytest.raises(StreamError, match=says):
        receive(decoder, wire[last])


def test_a_lost_message_is_an_error_though_no_sequence_is_open() -> None:
    encoder, decoder = ChunkEncoder(), ChunkDecoder()
    encoder.encode(Chunk(0, 0))
    with pytest.raises(StreamError, match="message 1 came, but 0 was due"):
        decoder.payload_size(encoder.encode(Chunk(1, 0))[0])


def test_a_chunk_out_of_its_place_is_an_error_though_message_numbers_agree() -> None:
    _, decoder = ends()
    further = ChunkEncoder()  # this end has gone on from a chunk that the other end never saw
    further.open(7, PROMPTS[7], [5, 6])
    further.open(30, PROMPTS[30])
    with pytest.raises(StreamError, match="sequence 7, offset 2 .*lost"):
        receive(decoder, further.encode(messages()[1]))
    encoder, decoder = ends()
    receive(decoder, encoder.encode(messages()[0]))
    behind, _ = ends()
    behind.encode(Chunk(0, 0, []))
    with pytest.raises(StreamError, match="sequence 7, offset 0 .*repeated"):
        receive(decoder, behind.encode(messages()[0]))


def test_ends_that_know_other_sequences_are_found() -> None:
    encoder, decoder = ends()
    decoder.close(7)
    decoder.open(7, (1, 2, 4))
    with pytest.raises(StreamError, match="sequence 7, offset 0 .*different prompts"):
        receive(decoder, encoder.encode(messages()[0]))
    encoder, decoder = ends()
    decoder.close(12)
    with pytest.raises(StreamError, match="sequence 12, offset 0 .*not open"):
        receive(decoder, encoder.encode(messages()[0]))


def test_a_message_of_something_else_or_of_another_length_is_an_error() -> None:
    encoder, decoder = ends()
    header, payload = encoder.encode(messages()[0])
    with pytest.raises(StreamError, match="out of step"):
        decoder.payload_size(payload[: len(header)])
    for cut in (payload[:-1], payload[:0], np.append(payload, 0)):
        with pytest.raises(StreamError, match="words"):
            decoder.decode(header, cut)


def test_closed_sequences_leave_nothing_behind() -> None:
    encoder, decoder = ends()
    for books in (encoder, decoder):
        for seq_id in PROMPTS:
            books.close(seq_id)
        assert books.ledgers == {}
        books.open(7, (5,))
    chunk = Chunk(0, 1, [row(7, 0, [1])])
    assert receive(decoder, encoder.encode(chunk)) == chunk
