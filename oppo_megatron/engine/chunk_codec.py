"""Chunks as integers on the wire, checked against what each sequence held before.

A message is a header of HEADER_SIZE int64 words, then a payload:

    header   magic, message index, logical clock, rows, tokens, halt (0 or 1), checksum of these six
    payload  per row: its line of the table of `row_words.py`, and a checksum; then the body

A row's checksum is the CRC-32 of everything sent for its sequence so far, the prompt first.  A lost or repeated chunk
shows in the offset, a corrupted one (or a peer that has another prompt) in the checksum; either is a StreamError and
never a wrong score.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oppo_megatron.engine.row_words import FIELDS, REASONS, Words, body_of, fields_of, row_of
from oppo_megatron.errors import StreamError
from oppo_megatron.records import Chunk, ChunkRow

HEADER_SIZE = 7
ROW_SIZE = FIELDS + 1
MAGIC = 0x4F50504F


@dataclass
class Ledger:
    """What has passed for one sequence: response tokens so far, and their running checksum."""

    offset: int
    checksum: int


class ChunkBooks:
    """The state that both ends of a stream keep: a ledger of each open sequence, opened with its prompt."""

    def __init__(self) -> None:
        self.ledgers: dict[int, Ledger] = {}
        self._next_index = 0

    def open(self, seq_id: int, prompt: Sequence[int], response: Sequence[int] = ()) -> None:
        """The sequence is admitted, in a resumed run with what it had of its response; chunks of it may follow."""
        checksum = zlib.crc32(np.asarray([*prompt, *response], dtype=np.int64).tobytes())
        self.ledgers[seq_id] = Ledger(len(response), checksum)

    def close(self, seq_id: int) -> None:
        """The sequence has been trained."""
        del self.ledgers[seq_id]


class ChunkEncoder(ChunkBooks):
    """The sending end."""

    def encode(self, chunk: Chunk) -> tuple[Words, Words]:
        """(header, payload) of the next message."""
        rows = np.array([self._row(row) for row in chunk.rows], dtype=np.int64).reshape(-1)
        num_tokens = sum(len(row.tokens) for row in chunk.rows)
        words = np.array(
            [MAGIC, self._next_index, chunk.clock, len(chunk.rows), num_tokens, chunk.halt], dtype=np.int64
        )
        header = np.append(words, zlib.crc32(words.tobytes()))
        self._next_index += 1
        return header, np.concatenate([rows, body_of(chunk.rows)])

    def _row(self, row: ChunkRow) -> list[int]:
        ledger = self.ledgers[row.seq_id]
        assert ledger.offset == row.offset, f"sequence {row.seq_id}: chunk at {row.offset} after {ledger.offset} tokens"
        ledger.offset += len(row.tokens)
        ledger.checksum = _checksum(row, ledger.checksum)
        return [*fields_of(row), ledger.checksum]


class ChunkDecoder(ChunkBooks):
    """The receiving end."""

    def payload_size(self, header: Words) -> int:
        """Words of the payload that follows.  Raises StreamError for a header out of its place."""
        magic, index, _, num_rows, num_tokens, _, checksum = (int(x) for x in header)
        if magic != MAGIC or checksum != zlib.crc32(header[:-1].tobytes()):
            raise StreamError(
                f"message {self._next_index}: the header {header.tolist()} is not one of a chunk; the stream is out of "
                "step or corrupted. Restart from the last checkpoint."
            )
        self._check_index(index)
        return num_rows * ROW_SIZE + 3 * num_tokens

    def decode(self, header: Words, payload: Words) -> Chunk:
        """The chunk.  Raises StreamError naming sequence and offset for a lost, repeated or corrupted one."""
        size = self.payload_size(header)
        if len(payload) != size:
            raise StreamError(
                f"message {self._due()}; its payload has {len(payload)} words where the header says {size}."
            )
        _, index, clock, num_rows, num_tokens, halt, _ = (int(x) for x in header)
        table = payload[: num_rows * ROW_SIZE].reshape(num_rows, ROW_SIZE)
        body = payload[num_rows * ROW_SIZE :].reshape(3, num_tokens)
        chunk, start = Chunk(index, clock, halt=bool(halt)), 0
        for *fields, checksum in table.tolist():
            seq_id, offset, count, _, finish, reason = fields
            if count < 0 or start + count > num_tokens or finish < -1 or not 0 <= reason < len(REASONS):
                raise StreamError(f"sequence {seq_id}, offset {offset}: the row of message {index} is corrupted.")
            row = row_of(fields, body, start)
            self._accept(row, checksum, index)
            chunk.rows.append(row)
            start += count
        self._next_index += 1
        return chunk

    def _check_index(self, index: int) -> None:
        if index == self._next_index:
            return
        kind = "lost" if index > self._next_index else "repeated"
        raise StreamError(f"a chunk message was {kind}: message {index} came where {self._due()}.")

    def _due(self) -> str:
        """The message that has to come next, and whose tokens it would bring first."""
        due = f"{self._next_index} was due"
        for seq_id, ledger in self.ledgers.items():
            return f"{due}; the first sequence waiting is sequence {seq_id} at offset {ledger.offset}"
        return due

    def _accept(self, row: ChunkRow, checksum: int, index: int) -> None:
        ledger = self.ledgers.get(row.seq_id)
        where = f"sequence {row.seq_id}, offset {row.offset} (message {index})"
        if ledger is None:
            raise StreamError(
                f"{where}: the sequence is not open here; its admission differs between actor and scorers."
            )
        if row.offset != ledger.offset:
            kind = "lost" if row.offset > ledger.offset else "repeated"
            raise StreamError(f"{where}: a chunk was {kind}; the next token due has offset {ledger.offset}.")
        found = _checksum(row, ledger.checksum)
        if found != checksum:
            raise StreamError(
                f"{where}: checksum {found:#010x} where {checksum:#010x} was sent; the chunk was corrupted on its way, "
                "or actor and scorers hold different prompts."
            )
        ledger.offset += len(row.tokens)
        ledger.checksum = found


def _checksum(row: ChunkRow, before: int) -> int:
    finish = -1 if row.finish_clock is None else row.finish_clock
    head = [row.seq_id, row.offset, row.version, finish, REASONS.index(row.finish_reason)]
    sent = (array("q", [*head, *row.tokens]), array("d", row.logprobs), array("d", row.sampling_logprobs))
    for numbers in sent:
        before = zlib.crc32(numbers, before)
    return before
