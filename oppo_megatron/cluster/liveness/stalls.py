"""Finds the rank that stands still, from notes that the ranks' watchdogs exchange.

Every rank regularly writes a note: its activity, whether it waits for others, and how often it has moved.  A run has stalled
if one of these has lasted for the deadline:

    a rank writes no more notes                it is stopped, dead, or a call that never returns holds its interpreter
    a rank does not move, and does not wait    a function that never returns, a file system that does not answer
    no rank moves                              they wait for each other, or for a message that was lost

A rank that waits for one that moves has not stalled, however long it waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from oppo_megatron.cluster.activity import Doing


@dataclass(frozen=True)
class Note:
    """One rank's word.  `number` grows from note to note, `beats` wherever the rank moves; `still_s`: since it last did.

    alarm: this rank has found a stall or heard of one, and its stacks are written.  told: it has made up its message.
    ended: it takes no further part.  elsewhere: what the speaker of a circle has heard of the others' ranks.
    """

    rank: int
    number: int
    beats: int
    what: str
    waits: bool
    still_s: float
    alarm: bool = False
    told: bool = False
    ended: bool = False
    elsewhere: str = ""

    @classmethod
    def of(cls, rank: int, number: int, doing: Doing) -> Note:
        return cls(rank, number, doing.beats, doing.what, doing.waits, doing.still_s)

    def encode(self) -> str:
        """One line of JSON, for `decode`."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Note:
        return cls(**json.loads(text))


class Watch:
    """What one observer knows of these ranks.  `clock` gives seconds.

    Time counts only while the observer runs: what passes between two looks counts as `longest_s` at most, so that a machine
    that was asleep, or a job that was stopped as a whole and goes on, raises no alarm.  `first_s`: so much longer may the
    first note of a rank take.  `later_s`: how much later than at the deadline this observer judges.  `whole`: these are all
    ranks of the run; otherwise all of them may well wait for others.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        deadline_s: float,
        longest_s: float,
        clock: Callable[[], float],
        first_s: float = 0.0,
        later_s: float = 0.0,
        whole: bool = True,
    ):
        self.ranks, self.deadline_s, self.longest_s = list(ranks), deadline_s, longest_s
        self._clock, self._last, self._passed = clock, clock(), 0.0
        self._limit_s, self._whole = deadline_s + later_s, whole
        self.notes: dict[int, Note] = {}
        self._heard = dict.fromkeys(ranks, first_s)
        self._moved = dict.fromkeys(ranks, first_s)
        self._alone = 0.0  # when the others were last within reach

    def observe(self, notes: Iterable[Note], *, reaches_others: bool = True) -> None:
        """Take in what the ranks say now.  Where the others cannot be asked, nothing is held against them."""
        now = self._clock()
        passed = min(now - self._last, self.longest_s)
        self._last, self._passed = now, self._passed + passed
        told = {note.rank: note for note in notes}
        for rank in self.ranks:
            note, known = told.get(rank), self.notes.get(rank)
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
        """Seconds since the rank's last note came."""
        return self._passed - self._heard[rank]

    def still_s(self, rank: int) -> float:
        """Seconds since the rank was last seen to have moved."""
        return self._passed - self._moved[rank]

    @property
    def alone_s(self) -> float:
        """Seconds since the others were last within reach."""
        return self._passed - self._alone

    @property
    def live(self) -> list[int]:
        """Ranks that have not said that they have ended."""
        return [rank for rank in self.ranks if rank not in self.notes or not self.notes[rank].ended]

    @property
    def alarmed(self) -> list[int]:
        """Ranks that know of a stall."""
        return [rank for rank in self.live if rank in self.notes and self.notes[rank].alarm]

    def stalled(self, own: int | None = None) -> bool:
        """Whether the run stands still.  `own` is the observer's rank, where it is one, to judge alone if it has to."""
        limit, live = self._limit_s, self.live
        if own is not None and self.alone_s >= limit:
            return self.still_s(own) >= limit
        if any(self.heard_s(rank) >= limit for rank in live):
            return True
        still = [rank for rank in live if self.still_s(rank) >= limit]
        nobody_moves = self._whole and bool(live) and len(still) == len(live)
        return nobody_moves or any(not self.notes[rank].waits for rank in still)

    def describe(self, own: int | None, answered: Collection[int], keeper: str, elsewhere: str = "") -> str:
        """Who does not move, and what each of the others was at.

        `answered`: the ranks that have spoken since the alarm; `keeper`: who has the place where the notes are put down;
        `elsewhere`: which ranks of other circles stand still.
        """
        live, alone_s = self.live, self.alone_s
        if own is not None and alone_s >= self.deadline_s:
            first = [own]
            head = f"the place where the ranks meet, which {keeper} keeps, has not answered for {alone_s:.0f} s"
        else:
            first = self._standing(answered)
            found = first or elsewhere
            head = "the run stands still" if found else "the run stands still, for its ranks wait for each other"
        states = [self._state(rank, rank in answered) for rank in first]
        states += [elsewhere] if elsewhere else []
        states += [self._state(rank, rank in answered) for rank in live if rank not in first]
        return f"{head} (stall_deadline_s is {self.deadline_s:g}): " + "; ".join(states)

    def describe_standing(self, answered: Collection[int]) -> str:
        """Who does not move, for other circles; "" where all wait."""
        return "; ".join(self._state(rank, rank in answered) for rank in self._standing(answered))

    def _standing(self, answered: Collection[int]) -> list[int]:
        return [rank for rank in self.live if rank not in answered] or self._longest_at_work(self.live)

    def _longest_at_work(self, live: Collection[int]) -> list[int]:
        """The rank that has been at one and the same thing for the longest, without waiting for another."""
        at_work = [rank for rank in live if not self.notes[rank].waits]
        at_work = [rank for rank in at_work if self.notes[rank].still_s >= self.deadline_s / 2]
        return sorted(at_work, key=lambda rank: self.notes[rank].still_s, reverse=True)[:1]

    def _state(self, rank: int, answered: bool) -> str:
        note = self.notes.get(rank)
        if note is None:
            return f"rank {rank} did not answer, and has never said what it does"
        if not answered:
            ago_s = self.heard_s(rank) + self.alone_s
            return (
                f"rank {rank} did not answer (it is stopped, has ended, or is within a call that lets nothing else run); it "
                f"last said, {ago_s:.0f} s ago: {note.what}"
            )
        if note.waits:
            return f"rank {rank} waited {note.still_s:.0f} s in vain: {note.what}"
        return f"rank {rank} has not moved for {note.still_s:.0f} s: {note.what}"
