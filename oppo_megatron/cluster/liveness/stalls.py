"""Find a stall from ranks' notes in a store: a rank writes none, a rank neither moves nor waits, or no rank moves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from oppo_megatron.cluster.rendezvous import MeetingPoint

LONGEST_TICK_S = 5.0
MOST_STATES = 32
"""Most ranks that a message describes."""


def tick_s(deadline_s: float) -> float:
    """Seconds between two notes."""
    return min(LONGEST_TICK_S, max(0.1, deadline_s / 20))


@dataclass(frozen=True)
class Note:
    rank: int
    number: int  # grows from note to note
    beats: int  # grows whenever the rank moves
    what: str
    waits: bool
    still_s: float  # seconds since it last moved
    alarm: bool = False  # this rank has found a stall or read of one, and its stacks are written
    verdict: str = ""  # its message about the stall
    ended: bool = False


class Board:
    """Notes of `ranks` in a store of the process `keeper`. A thread calls it: calls to a stopped process never return."""

    def __init__(self, connect: Callable[[], dist.Store], ranks: Sequence[int], keeper: str):
        self.keeper, self._connect, self._keys = keeper, connect, [str(rank) for rank in ranks]
        self._unknown = set(self._keys)  # without a note, for which `multi_get` would wait
        self._store: dist.Store | None = None
        self._call: threading.Thread | None = None
        self._found: list[Note] | None = None

    def exchange(self, mine: Note | None, within_s: float) -> list[Note] | None:
        """Write a note and read all notes; None if the store does not answer in time."""
        if self._call is not None and self._call.is_alive():
            self._call.join(within_s)
            return None
        self._found = None
        self._call = threading.Thread(target=self._exchange, args=(mine,), name="stall notes", daemon=True)
        self._call.start()
        self._call.join(within_s)
        return None if self._call.is_alive() else self._found

    def _exchange(self, mine: Note | None) -> None:
        with suppress(RuntimeError, ValueError):  # the store has ended, or the value is not a note
            if self._store is None:
                self._store = self._connect()
            store = self._store
            if mine is not None:
                store.set(str(mine.rank), json.dumps(asdict(mine)))
            if self._unknown and store.check(list(self._unknown)):  # one call, if all have come
                self._unknown.clear()
            self._unknown = {key for key in self._unknown if not store.check([key])}
            keys = [key for key in self._keys if key not in self._unknown]
            self._found = [Note(**json.loads(text)) for text in store.multi_get(keys)] if keys else []


def board_at(point: MeetingPoint, ranks: Sequence[int] | None = None) -> Board:
    def connect() -> dist.Store:
        address = "localhost" if point.opens and not point.address.startswith("127.") else point.address
        timeout = timedelta(seconds=LONGEST_TICK_S)
        store = dist.TCPStore(address, point.port, None, False, timeout, wait_for_workers=False)
        return dist.PrefixStore(f"{point.name}/stalls", store)

    return Board(connect, range(point.size) if ranks is None else ranks, point.opener)


class Watch:
    """An observer's view of ranks (`whole`: all of the run, so one must move).

    At most three ticks count between looks: a suspended machine raises no alarm. `first_s`, `later_s`: extra time until the first
    notes and for this observer.
    """

    def __init__(
        self, ranks: Sequence[int], deadline_s: float, clock: Callable[[], float], first_s: float = 0.0, later_s: float = 0.0,
        whole: bool = True,
    ):  # fmt: skip
        self.ranks, self.deadline_s, self._whole, self._longest_s = list(ranks), deadline_s, whole, 3 * tick_s(deadline_s)
        self._clock, self._last, self._passed = clock, clock(), 0.0
        self._limit_s = deadline_s + later_s
        self.notes: dict[int, Note] = {}
        self._heard = dict.fromkeys(ranks, first_s)
        self._moved = dict.fromkeys(ranks, first_s)
        self._alone = 0.0  # when the others were last within reach

    def observe(self, notes: Iterable[Note], *, reaches_others: bool = True) -> None:
        """If the others cannot be read, their silence does not count."""
        now = self._clock()
        passed = min(now - self._last, self._longest_s)
        self._last, self._passed = now, self._passed + passed
        read = {note.rank: note for note in notes}
        for rank in self.ranks:
            note, known = read.get(rank), self.notes.get(rank)
            if note is None:
                if not reaches_others:
                    self._heard[rank] += passed
                    self._moved[rank] += passed
                continue
            if known is None or note.number != known.number:
                self._heard[rank] = self._passed
            if known is None or note.beats != known.beats:
                self._moved[rank] = self._passed
            self.notes[rank] = note
        if reaches_others:
            self._alone = self._passed

    def heard_s(self, rank: int) -> float:
        return self._passed - self._heard[rank]

    def still_s(self, rank: int) -> float:
        return self._passed - self._moved[rank]

    @property
    def alone_s(self) -> float:
        """Seconds since the others were last readable."""
        return self._passed - self._alone

    @property
    def live(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.notes or not self.notes[rank].ended]

    @property
    def alarmed(self) -> list[int]:
        return [rank for rank in self.live if rank in self.notes and self.notes[rank].alarm]

    def stalled(self, own: int | None = None) -> bool:
        """Rank `own` judges itself if it cannot read the others."""
        limit, live = self._limit_s, self.live
        if own is not None and self.alone_s >= limit:
            return self.still_s(own) >= limit
        if any(self.heard_s(rank) >= limit for rank in live):
            return True
        still = [rank for rank in live if self.still_s(rank) >= limit]
        nobody_moves = self._whole and bool(live) and len(still) == len(live)
        return nobody_moves or any(not self.notes[rank].waits for rank in still)

    def describe(self, own: int | None, answered: Collection[int], keeper: str) -> str:
        """Stalled ranks first. `answered`: ranks with a note since the alarm."""
        live, alone_s = self.live, self.alone_s
        if own is not None and alone_s >= self.deadline_s:
            first = [own]
            head = f"the ranks' store, kept by {keeper}, has not answered for {alone_s:.0f} s"
        else:
            first = [rank for rank in live if rank not in answered]
            if not first:  # the rank that has been at work for longest
                notes = [self.notes[rank] for rank in live]
                at_work = [note for note in notes if not note.waits and note.still_s >= self.deadline_s / 2]
                first = [note.rank for note in sorted(at_work, key=lambda note: note.still_s)[-1:]]
            head = "the run has stalled" if first else "the run has stalled, because its ranks wait for each other"
        order = [*first, *[rank for rank in live if rank not in first]]
        states = [self._state(rank, rank in answered) for rank in order[:MOST_STATES]]
        if len(order) > MOST_STATES:
            states.append(f"and {len(order) - MOST_STATES} other ranks")
        return f"{head} (stall_deadline_s is {self.deadline_s:g}): " + "; ".join(states)

    def _state(self, rank: int, answered: bool) -> str:
        note = self.notes.get(rank)
        if note is None:
            return f"rank {rank} did not answer, and has written no note"
        if not answered:
            ago_s = self.heard_s(rank) + self.alone_s
            return (
                f"rank {rank} did not answer (it is stopped, has ended, or is within a call that lets nothing else run); it "
                f"last said, {ago_s:.0f} s ago: {note.what}"
            )
        if note.waits:
            return f"rank {rank} waited {note.still_s:.0f} s in vain: {note.what}"
        return f"rank {rank} has not moved for {note.still_s:.0f} s: {note.what}"
