"""Merges the tokens that the actor's replicas decoded in a round into the one chunk that every rank records.

Every running sequence gets one token a decode step, so token k of a row has the logical clock `start + 1 + k`.  Replicas (and
decode micro-batches) do not wait for each other within a round.  Tokens decoded beyond the step at which the batch was
complete are cut off here, so the chunk equals the one that a single process would have decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np

from oppo_megatron.chunks import GOES_ON, Chunk, ChunkRow, ChunkRows


class StopSignal(Protocol):
    """What ends a round early: told of all finished sequences, `ready` once the batch is complete.

    It is not ready before `least` more sequences have finished.
    """

    @property
    def ready(self) -> bool: ...

    @property
    def least(self) -> int: ...

    def finish(self, *seq_ids: int) -> None: ...


def merge_rows(index: int, start: int, rows: ChunkRows | Iterable[ChunkRow], stop: StopSignal) -> Chunk:
    """The chunk of a round that began at clock `start`, ending at the first clock at which `stop` is ready.

    The rows of sequences that got tokens beyond that clock are shortened.
    """
    rows = ChunkRows.of(rows)
    filled = np.flatnonzero(rows.counts)
    rows = rows.at(filled[np.argsort(rows.seq_ids[filled], kind="stable")])
    end = _stop_clock(start, rows, stop)
    return Chunk(index, end, rows.cut(end - start))


def _stop_clock(start: int, rows: ChunkRows, stop: StopSignal) -> int:
    ended = np.flatnonzero(rows.finish_clocks != GOES_ON)
    ended = ended[np.argsort(rows.finish_clocks[ended], kind="stable")]
    clocks, seq_ids = rows.finish_clocks[ended], rows.seq_ids[ended].tolist()
    # All that end before the last of the least that it takes end together: nobody has to ask in between.
    sooner = int(np.searchsorted(clocks, clocks[min(max(stop.least, 1), len(clocks)) - 1])) if seq_ids else 0
    stop.finish(*seq_ids[:sooner])
    edges = [*(np.flatnonzero(np.diff(clocks, prepend=GOES_ON)[sooner:]) + sooner).tolist(), len(seq_ids)]
    for first, end in pairwise(edges if seq_ids else ()):
        stop.finish(*seq_ids[first:end])
        if stop.ready:
            return int(clocks[first])
    return start + int(rows.counts.max(initial=0))
