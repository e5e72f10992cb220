"""Ranks in circles: a watchdog reads the notes of its own circle, and one speaks for it to the others.

One store serves all watchdogs in turn, so that what each reads must not grow with the run.  The
speaker of a circle is its lowest rank that has not ended; it writes a summary of the circle's notes, and reads all summaries.

    a rank of the circle is silent, or stands and does not wait    every rank of the circle sees it by itself
    no rank of any circle moves; a whole circle is silent          the speakers see it from the summaries
    an alarm                                                       goes from the circle to its speaker, to the others, to theirs
"""

from __future__ import annotations

from collections.abc import Collection

from oppo_megatron.cluster.hosts import format_ranks
from oppo_megatron.cluster.liveness.board import Board
from oppo_megatron.cluster.liveness.circles import Circles
from oppo_megatron.cluster.liveness.stalls import Note, Watch


class Summaries:
    """The summaries of all circles, as the speaker of circle `number` knows them.  A summary is a note, its rank the circle.

    It moves when any rank of the circle does, and is never one that stands without waiting: its own circle sees to that.
    """

    def __init__(self, circles: Circles, number: int, board: Board, watch: Watch):
        self.circles, self.number, self.board, self.watch = circles, number, board, watch
        self._said: str | None = None
        self._count = 0

    def say(self, text: str) -> None:
        """From now on the summary tells which ranks of the circle stand still, or "" that none does."""
        self._said = text

    def exchange(self, near: Watch, within_s: float) -> None:
        """Put down the summary of what `near` knows of the circle, and take in all others'."""
        self._count += 1
        notes = [near.notes[rank] for rank in near.live if rank in near.notes]
        mine = Note(
            self.number, self._count, sum(note.beats for note in near.notes.values()), self._said or "", True,
            min((note.still_s for note in notes), default=0.0),
            alarm=bool(near.alarmed), told=self._said is not None, ended=not near.live,
        )  # fmt: skip
        found = self.board.exchange(mine, within_s)
        others = [note for note in found or [] if note.rank != self.number]
        self.watch.observe([mine, *others], reaches_others=found is not None)

    @property
    def stalled(self) -> bool:
        """Whether another circle has found a stall, or the circles together stand still."""
        return bool(self.watch.alarmed) or self.watch.stalled()

    @property
    def told(self) -> bool:
        """Whether every circle has said which of its ranks stand still."""
        return all(number in self.watch.notes and self.watch.notes[number].told for number in self.watch.live)

    def elsewhere(self) -> str:
        """What the other circles have said, and which have not."""
        notes = self.watch.notes
        others = [number for number in self.watch.live if number != self.number]
        silent = [number for number in others if number not in notes or not notes[number].told]
        ranks = format_ranks(rank for number in silent for rank in self.circles.members(number))
        told = [notes[number].what for number in others if number not in silent and notes[number].what]
        return "; ".join([*told, *([f"nobody answered for ranks {ranks}"] if silent else [])])


def speaker(watch: Watch, answered: Collection[int] | None = None) -> int | None:
    """Who speaks for a circle: the lowest rank that has not ended, and that has `answered` if this is known."""
    return min((rank for rank in watch.live if answered is None or rank in answered), default=None)
