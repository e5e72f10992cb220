"""Where watchdogs put down their notes: a store.  One that does not answer keeps nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from oppo_megatron.cluster.liveness.stalls import Note
from oppo_megatron.cluster.rendezvous import MeetingPoint

LONGEST_TICK_S = 5.0


def tick_s(deadline_s: float) -> float:
    """Seconds between two notes."""
    return min(LONGEST_TICK_S, max(0.1, deadline_s / 20))


class Board:
    """The notes of these ranks, in a store.  `connect` opens a connection of its own to it.

    A call to a store whose process is stopped never returns: calls are made by a thread that may be left behind.
    """

    def __init__(self, connect: Callable[[], dist.Store], ranks: Sequence[int], keeper: str):
        self.keeper = keeper
        self._connect, self._ranks = connect, list(ranks)
        self._store: dist.Store | None = None
        self._known: set[int] = set()
        self._call: threading.Thread | None = None
        self._found: list[Note] | None = None

    def exchange(self, mine: Note | None, within_s: float) -> list[Note] | None:
        """Put down a note, and read all; None where the store does not answer in time."""
        if self._call is None or not self._call.is_alive():
            self._found = None
            self._call = threading.Thread(target=self._exchange, args=(mine,), name="stall notes", daemon=True)
            self._call.start()
            self._call.join(within_s)
            if not self._call.is_alive():
                return self._found
        else:
            self._call.join(within_s)
        return None

    def _exchange(self, mine: Note | None) -> None:
        with suppress(RuntimeError, ValueError):  # the store has ended, or the value is no note
            if self._store is None:
                self._store = self._connect()
            store = self._store
            if mine is not None:
                store.set(str(mine.rank), mine.encode())
                self._known.add(mine.rank)
            new = [rank for rank in self._ranks if rank not in self._known and store.check([str(rank)])]
            self._known.update(new)
            keys = [str(rank) for rank in sorted(self._known)]
            self._found = [Note.decode(text) for text in store.multi_get(keys)] if keys else []


def board_of(point: MeetingPoint, ranks: Sequence[int] | None = None, name: str = "stalls") -> Board:
    """The board of the ranks that meet at a point (or of `ranks` of them); for them, and for who has started them."""

    def connect() -> dist.Store:
        address = "localhost" if point.opens and not point.address.startswith("127.") else point.address
        timeout = timedelta(seconds=LONGEST_TICK_S)
        store = dist.TCPStore(address, point.port, None, False, timeout, wait_for_workers=False)
        return dist.PrefixStore(f"{point.name}/{name}", store)

    return Board(connect, range(point.size) if ranks is None else ranks, point.opener)
