"""Chunks as rows and as columns, the columns of rollouts, and what is sent: encoded, decoded, and found damaged."""

import math
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import FREE, REASONS, Chunk, ChunkRow, ChunkRows
from oppo_megatron.columns import Columns, Held, Table
from oppo_megatron.engine.stream import ChunkDecoder, ChunkEncoder, from_words, to_words
from oppo_megatron.errors import StreamError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt, Rollout


def rows_of(rng: random.Random, ids: list[int]) -> list[ChunkRow]:
    made = []
    for seq_id in ids:
        tokens = [rng.randrange(2**31) for _ in range(rng.randint(0, 4))]
        logprobs, sampling = ([-rng.random() for _ in tokens] for _ in range(2))
        finish = (rng.randint(0, 99), rng.choice(REASONS[1:])) if rng.random() < 0.5 else (None, None)
        made.append(ChunkRow(seq_id, rng.randint(0, 50), tokens, logprobs, sampling, rng.randint(0, 9), *finish))
    return made


def cut(row: ChunkRow, keep: int) -> ChunkRow:
    shorter = row.tokens[:keep], row.logprobs[:keep], row.sampling_logprobs[:keep]
    return row if len(row.tokens) <= keep else ChunkRow(row.seq_id, row.offset, *shorter, row.version)


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
    assert decoder.payload_size(message[0]) == len(message[1])
    return decoder.decode(*message)


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
    got = receive(decoder, encoder.encode(Chunk(0, 4, [ChunkRow(7, 0, [1, 2, 3, 4], values, values[::-1], 0)]))).rows[0]
    assert np.array(got.logprobs).tobytes() == np.array(values).tobytes()
    assert np.array(got.sampling_logprobs).tobytes() == np.array(values[::-1]).tobytes()


@pytest.mark.parametrize("bit", [0, 1, 31, 40, 63])
def test_each_flipped_word_is_an_error(bit: int) -> None:
    encoder, _ = ends()
    first, second = (encoder.encode(chunk) for chunk in messages()[:2])
    for part in (0, 1):
        for word in range(len(second[part])):
            _, decoder = ends()
            receive(decoder, first)
            bad = [each.copy() for each in second]
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


@pytest.mark.parametrize(("order", "says"), [
    ([0, 2], "lost.*message 2 came, but 1 was due.*sequence 7 at offset 2"),
    ([0, 0], "repeated.*message 0 came, but 1 was due.*sequence 7 at offset 2"), ([1], "message 1 came, but 0 was due"),
], ids=["lost", "repeated", "reordered"])  # fmt: skip
def test_a_message_out_of_order_is_an_error(order: list[int], says: str) -> None:
    encoder, decoder = ends()
    wire = [encoder.encode(chunk) for chunk in messages()]
    *before, last = order
    for index in before:
        receive(decoder, wire[index])
    with pytest.raises(StreamError, match=says):
        receive(decoder, wire[last])
    encoder, decoder = ChunkEncoder(), ChunkDecoder()
    encoder.encode(Chunk(0, 0))
    with pytest.raises(StreamError, match="message 1 came, but 0 was due"):  # though no sequence is open
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


def test_ends_that_know_other_sequences_and_messages_of_something_else_are_found() -> None:
    encoder, decoder = ends()
    decoder.close(7)
    decoder.open(7, (1, 2, 4))
    with pytest.raises(StreamError, match="sequence 7, offset 0 .*different prompts"):
        receive(decoder, encoder.encode(messages()[0]))
    encoder, decoder = ends()
    decoder.close(12)
    with pytest.raises(StreamError, match="sequence 12, offset 0 .*not open"):
        receive(decoder, encoder.encode(messages()[0]))
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


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), backfill=st.booleans())
def test_columns_follow_the_rollouts(seed: int, backfill: bool) -> None:
    rng, buffer, next_id, taken = random.Random(seed), RolloutBuffer(4, 3, 2, backfill=backfill), 0, list[Held]()
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
            assert all(np.array_equal(*each) for each in zip(held.columns(), Columns.of(held), strict=True))


@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize(("held", "new", "due"), [
    ([], [], []), (["a"], ["b", "c"], ["a", "b", "c"]), ([], ["b", "c"], [FREE, "b", "c"]), (["a"], [], ["a", FREE, FREE]),
])  # fmt: skip
def test_tokens_without_a_route_are_free_beside_others(held: list[str], new: list[str], due: list[str]) -> None:
    """As in a run that was resumed with, or from, another `rollout.router_replay`."""
    own = Rollout(Prompt(0, 0, "", (1, 2)), 0, [5], [0.5], [0.25], [3], routes=held)
    own.extend(ChunkRow(0, 1, [6, 7], [1.0, 2.0], [1.5, 2.5], 4, routes=new))
    assert own.routes == due


def test_lists_may_be_set_and_added_to() -> None:
    own, names = Rollout(Prompt(0, 0, "", (1,)), 0), ("tokens", "logprobs", "sampling_logprobs", "versions")
    own.extend(ChunkRow(0, 0, [6], [1.0], [1.5], 4))
    for name, value in zip(names, (7, 2.0, 2.5, 5), strict=True):
        getattr(own, name).extend([value])
    own.extend(ChunkRow(0, 2, [8], [3.0], [3.5], 6))
    assert [getattr(own, name) for name in names] == [[6, 7, 8], [1.0, 2.0, 3.0], [1.5, 2.5, 3.5], [4, 5, 6]]
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
