"""The chunk of several replicas and micro-batches is the one that a single process, stepping in lockstep, would record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow, merge_rows
from oppo_megatron.overcommit.readiness import Readiness

VERSION, INDEX = 3, 5


@dataclass
class Case:
    """A round: how many more tokens each sequence has in it, what the batch waits for, and who decodes what."""

    lengths: Mapping[int, int]
    offsets: Mapping[int, int]
    needed: int
    forced: frozenset[int]
    chunk: int
    start: int
    lanes: Sequence[Sequence[int]] = field(default_factory=list)
    overrun: Sequence[int] = field(default_factory=list)

    def signal(self) -> Readiness:
        return Readiness(self.needed, 0, self.lengths.keys(), [(self.forced, len(self.forced))] if self.forced else [])


def row_of(case: Case, seq_id: int, num_tokens: int) -> ChunkRow:
    """The first `num_tokens` tokens of a sequence in this round; each is unlike every other."""
    tokens = [1000 * seq_id + case.offsets[seq_id] + k for k in range(num_tokens)]
    row = ChunkRow(seq_id, case.offsets[seq_id], tokens, [-t / 7 for t in tokens], [-t / 9 for t in tokens], VERSION)
    if num_tokens == case.lengths[seq_id]:
        row.finish_clock, row.finish_reason = case.start + num_tokens, "eos" if seq_id % 2 else "length"
    return row


def lockstep(case: Case) -> tuple[Chunk, int]:
    """One process: a token for each running sequence a step, until the batch is complete or the chunk ends."""
    stop, running, counts = case.signal(), set(case.lengths), dict.fromkeys(case.lengths, 0)
    steps = 0
    while steps < case.chunk and running and not stop.ready:
        steps += 1
        for seq_id in sorted(running):
            counts[seq_id] += 1
            if counts[seq_id] == case.lengths[seq_id]:
                running.remove(seq_id)
                stop.finish(seq_id)
    rows = [row_of(case, seq_id, count) for seq_id, count in sorted(counts.items()) if count]
    return Chunk(INDEX, case.start + steps, rows), steps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ids = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
    case = Case(
        lengths={i: draw(st.integers(1, 12)) for i in ids},
        offsets={i: draw(st.integers(0, 30)) for i in ids},
        needed=draw(st.integers(0, len(ids) + 1)),
        forced=frozenset(draw(st.sets(st.sampled_from(ids), max_size=2))),
        chunk=draw(st.integers(1, 10)),
        start=draw(st.integers(0, 50)),
    )
    assume(not case.signal().ready)
    homes = {i: draw(st.integers(0, 4)) for i in ids}  # five decode micro-batches, over replicas or not
    case.lanes = [[i for i in ids if homes[i] == lane] for lane in range(5)]
    case.overrun = [draw(st.integers(0, 10)) for _ in range(5)]
    return case


@settings(deadline=None, max_examples=400)
@given(cases())
def test_the_merged_chunk_is_that_of_one_process(case: Case) -> None:
    expected, steps = lockstep(case)
    rows = []
    for lane, overrun in zip(case.lanes, case.overrun, strict=True):
        reached = min(case.chunk, steps + overrun)  # a lane may not have heard yet that the batch is complete
        for seq_id in lane:
            rows.append(row_of(case, seq_id, min(reached, case.lengths[seq_id])))
    assert merge_rows(INDEX, case.start, rows, case.signal()) == expected


@settings(deadline=None)
@given(cases())
def test_the_order_of_the_replicas_does_not_matter(case: Case) -> None:
    def rows() -> list[ChunkRow]:
        return [row_of(case, i, min(case.chunk, n)) for i, n in case.lengths.items()]

    assert merge_rows(INDEX, case.start, rows(), case.signal()) == merge_rows(INDEX, case.start, reversed(rows()), case.signal())


def test_a_sequence_that_waited_for_a_slot_has_no_row() -> None:
    case = Case({1: 9, 2: 9}, {1: 0, 2: 0}, needed=2, forced=frozenset(), chunk=4, start=0)
    merged = merge_rows(INDEX, 0, [row_of(case, 1, 4), row_of(case, 2, 0)], case.signal())
    assert [row.seq_id for row in merged.rows] == [1] and merged.clock == 4
