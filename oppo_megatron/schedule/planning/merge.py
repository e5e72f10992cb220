"""Merges the tokens that the actor's replicas decoded in a round into the one chunk that every rank records.

Every running sequence gets one token a decode step, so token k of a row has the logical clock `start + 1 + k`.  Replicas (and
decode micro-batches) do not wait for each other within a round.  Tokens decoded beyond the step at which the batch was
complete are cut off here, so the chunk equals the one that a single process would have decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol

from oppo_megatron.records import Chunk, ChunkRow


class StopSignal(Protocol):
    """What ends a round early: told of every finished sequence, `ready` once the batch is complete."""

    @property
    def ready(self) -> bool: ...

    def finish(self, seq_id: int) -> None: ...


def merge_rows(index: int, start: int, rows: Iterable[ChunkRow], stop: StopSignal) -> Chunk:
    """The chunk of a round that began at clock `start`, ending at the first clock at which `stop` is ready.

    The rows of sequences that got tokens beyond that clock are shortened in place.
    """
    rows = sorted((row for row in rows if row.tokens), key=attrgetter("seq_id"))
    end = _stop_clock(start, rows, stop)
    keep = end - start
    for row in [row for row in rows if len(row.tokens) > keep]:
        del row.tokens[keep:], row.logprobs[keep:], row.sampling_logprobs[keep:]
        row.finish_clock = row.finish_reason = None
    return Chunk(index, end, rows)


def _stop_clock(start: int, rows: list[ChunkRow], stop: StopSignal) -> int:
    ends: dict[int, list[int]] = {}
    for clock, seq_id in [(row.finish_clock, row.seq_id) for row in rows if row.finish_clock is not None]:
        ends.setdefault(clock, []).append(seq_id)
    for clock in sorted(ends):
        for seq_id in ends[clock]:
            stop.finish(seq_id)
        if stop.ready:
            return clock
    return start + max((len(row.tokens) for row in rows), default=0)
