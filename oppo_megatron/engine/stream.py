"""The token stream from the actor to ranks without it; listening ranks may forward chunks (`Site.feeds`).

A message is a header of HEADER_SIZE int64 words, then a payload:

    header   magic, message index, logical clock, rows, tokens, orders (bits), rows of the body, checksum of these seven
    payload  per row: sequence id, offset, tokens, policy version, finish clock or -1, ending, checksum; then the body
    body     all tokens, then all log-probs, then all sampling log-probs (float64 bits), then all routes' words in turn

A row's checksum is the CRC-32 of its sequence's data, prompt first.  The offset detects lost or repeated chunks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.chunks import FIELDS, NOTHING, REASONS, UNFINISHED, Chunk, ChunkRows, Ints, Orders
from oppo_megatron.cluster.process_groups import gather_ragged
from oppo_megatron.errors import StreamError
from oppo_megatron.mcore.device import on_device
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action

DRAWN = 3  # numbers of a drawn token: id, log-prob, sampling log-prob
HEADER_SIZE = 8
ROW_SIZE = FIELDS + 1
MAGIC = 0x4F50504F


def to_words(rows: ChunkRows) -> Ints:
    rows = rows.packed()
    return np.concatenate([np.array([len(rows)], dtype=np.int64), rows.table.T.reshape(-1), rows.body.reshape(-1)])


def from_words(words: Ints) -> ChunkRows:
    """Inverse of `to_words`; tokens are views."""
    end = 1 + int(words[0]) * FIELDS
    table = np.ascontiguousarray(words[1:end].reshape(-1, FIELDS).T)
    num_tokens = int(table[2].sum())
    return ChunkRows.packed_as(table, words[end:].reshape(-1, num_tokens) if num_tokens else NOTHING)


def gather_rows(rows: ChunkRows, group: dist.ProcessGroup) -> ChunkRows:
    mine = torch.from_numpy(to_words(rows))
    return ChunkRows.joined([from_words(words.numpy()) for words in gather_ragged(mine, group)])


class ChunkBooks:
    """Offset and checksum of each open sequence."""

    def __init__(self) -> None:
        self.ledgers: dict[int, tuple[int, int]] = {}
        self._next_index = 0

    def open(self, seq_id: int, prompt: Sequence[int], response: Sequence[int] = ()) -> None:
        checksum = zlib.crc32(struct.pack(f"={len(prompt) + len(response)}q", *prompt, *response))
        self.ledgers[seq_id] = len(response), checksum

    def close(self, seq_id: int) -> None:
        del self.ledgers[seq_id]

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.open(rollout.seq_id, rollout.prompt.tokens, rollout.tokens)

    def retire(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.close(rollout.seq_id)


class ChunkEncoder(ChunkBooks):
    def encode(self, chunk: Chunk) -> tuple[Ints, Ints]:
        rows = chunk.rows.packed()
        checksum_of, checksums = _checksum_of(rows), list[int]()
        for i, (seq_id, offset, count) in enumerate(rows.table[:3].T.tolist()):
            due, before = self.ledgers[seq_id]
            assert due == offset, f"sequence {seq_id}: chunk at {offset} after {due} tokens"
            checksums.append(checksum_of(i, before))
            self.ledgers[seq_id] = offset + count, checksums[-1]
        table = np.vstack([rows.table, np.array(checksums, dtype=np.int64)])
        sizes = len(rows), rows.num_tokens, chunk.orders, len(rows.body)
        words = np.array([MAGIC, self._next_index, chunk.clock, *sizes], dtype=np.int64)
        header = np.append(words, zlib.crc32(words.tobytes()))
        self._next_index += 1
        return header, np.concatenate([table.T.reshape(-1), rows.body.reshape(-1)])


class ChunkDecoder(ChunkBooks):
    def payload_size(self, header: Ints) -> int:
        """Return the payload's words.  Raises StreamError."""
        magic, index, _, num_rows, num_tokens, _, depth, checksum = (int(x) for x in header)
        if magic != MAGIC or checksum != zlib.crc32(header[:-1].tobytes()):
            raise StreamError(
                f"message {self._next_index}: the header {header.tolist()} is not one of a chunk; the stream is out of "
                "step or corrupted. Restart from the last checkpoint."
            )
        if index != self._next_index:
            kind = "lost" if index > self._next_index else "repeated"
            raise StreamError(f"a chunk message was {kind}: message {index} came, but {self._due()}.")
        return num_rows * ROW_SIZE + depth * num_tokens

    def decode(self, header: Ints, payload: Ints) -> Chunk:
        size = self.payload_size(header)
        if len(payload) != size:
            raise StreamError(f"message {self._due()}; its payload has {len(payload)} words, but the header says {size}.")
        _, index, clock, num_rows, num_tokens, orders, depth, _ = (int(x) for x in header)
        table = payload[: num_rows * ROW_SIZE].reshape(num_rows, ROW_SIZE)
        body = payload[num_rows * ROW_SIZE :].reshape(depth, num_tokens)
        self._require_whole(table.T, num_tokens, index)
        rows = ChunkRows.packed_as(np.ascontiguousarray(table[:, :FIELDS].T), body)
        self._accept(rows, table[:, FIELDS].tolist(), index)
        self._next_index += 1
        return Chunk(index, clock, rows, Orders(orders))

    def _require_whole(self, table: Ints, num_tokens: int, index: int) -> None:
        seq_ids, offsets, counts, _, finish, reasons, _ = table
        ends = np.cumsum(np.clip(counts, 0, num_tokens))
        bad = (counts < 0) | (counts > num_tokens) | (ends > num_tokens)
        bad |= (finish < UNFINISHED) | (reasons < 0) | (reasons >= len(REASONS))
        for i in np.flatnonzero(bad)[:1].tolist():
            raise StreamError(f"sequence {seq_ids[i]}, offset {offsets[i]}: the row of message {index} is corrupted.")

    def _due(self) -> str:
        due = f"{self._next_index} was due"
        for seq_id, (offset, _) in self.ledgers.items():
            return f"{due}; the first sequence waiting is sequence {seq_id} at offset {offset}"
        return due

    def _accept(self, rows: ChunkRows, checksums: Sequence[int], index: int) -> None:
        """Advance the ledgers.  Raises StreamError."""
        checksum_of = _checksum_of(rows)
        for i, (seq_id, offset, count) in enumerate(rows.table[:3].T.tolist()):
            where = f"sequence {seq_id}, offset {offset} (message {index})"
            if seq_id not in self.ledgers:
                raise StreamError(f"{where}: the sequence is not open here; its admission differs between actor and scorers.")
            due, before = self.ledgers[seq_id]
            if offset != due:
                kind = "lost" if offset > due else "repeated"
                raise StreamError(f"{where}: a chunk was {kind}; the next token due has offset {due}.")
            found = checksum_of(i, before)
            if found != checksums[i]:
                raise StreamError(
                    f"{where}: checksum {found:#010x}, but {checksums[i]:#010x} was sent; the chunk "
                    "was corrupted on its way, or actor and scorers hold different prompts."
                )
            self.ledgers[seq_id] = offset + count, found


def _checksum_of(rows: ChunkRows) -> Callable[[int, int], int]:
    """Return a function (row of the packed `rows`, its sequence's checksum before) -> checksum after the row."""
    heads = memoryview(np.ascontiguousarray(rows.table[[0, 1, 3, 4, 5]].T).tobytes())
    body = [memoryview(part).cast("B") for part in np.ascontiguousarray(rows.body)] if rows.num_tokens else []
    starts, ends = (8 * rows.starts).tolist(), (8 * (rows.starts + rows.counts)).tolist()
    size = 8 * (FIELDS - 1)

    def checksum(row: int, before: int) -> int:
        before = zlib.crc32(heads[size * row : size * (row + 1)], before)
        for part in body:
            before = zlib.crc32(part[starts[row] : ends[row]], before)
        return before

    return checksum


class ChunkOutlet(ChunkEncoder):
    """The sending end.  All ranks that send encode the same messages."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._encoded: tuple[Chunk, list[Tensor]] | None = None

    def message(self, chunk: Chunk) -> list[Tensor]:
        if self._encoded is None or self._encoded[0] is not chunk:
            words = self.encode(chunk)
            self._encoded = chunk, [on_device(torch.from_numpy(part), self.device) for part in words if len(part)]
        return self._encoded[1]


class ListenWorker(ChunkDecoder):
    """The receiving end, on ranks without the actor; it may forward chunks."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._chunk: Chunk | None = None
        self._received: list[Tensor] = []

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        raise AssertionError(f"{action}: this rank does not hold the actor")

    def outbox(self, action: Action) -> Sequence[Tensor]:
        assert self._received, f"{action}: no chunk has come"
        return self._received

    def inbox(self, action: Action) -> Iterator[Tensor]:
        """Yield header and payload.  Raises StreamError unless next and intact."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.device)
        yield header
        words = header.cpu().numpy()
        payload = torch.empty(self.payload_size(words), dtype=torch.int64, device=self.device)
        if payload.numel():
            yield payload
        self._received = [header, payload] if payload.numel() else [header]
        self._chunk = self.decode(words, payload.cpu().numpy())

    def end(self) -> Chunk:
        assert self._chunk is not None
        chunk, self._chunk, self._received = self._chunk, None, []
        return chunk


def share(values: Tensor | None, size: int, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Broadcast `size` float64 numbers from rank `source` (to `group`: default all); other ranks pass None."""
    vector = torch.empty(size, dtype=torch.float64, device=device)
    if dist.get_rank() == source:
        assert values is not None and values.numel() == size
        vector.copy_(on_device(values, device))
    if dist.get_world_size() > 1:
        dist.broadcast(vector, source, group=group)
    return vector


def of_first_rank(value: int, device: torch.device) -> int:
    return int(share(torch.tensor([value]), 1, 0, device))
