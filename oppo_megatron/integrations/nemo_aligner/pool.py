"""One replica's rollouts, decoded in waves. Needs no nemo.

NeMo's generation keeps a call's rows at one position, so waves are rollout micro-batches: carried rows by length, then new
ones. Unfinished rows, at most as many as were drawn beyond the batch:

    after wave w, at most  spare * (rows of waves 0..w) // (rows of all waves)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """A rollout. `versions`: (policy, tokens drawn), oldest first."""

    key: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    deferrals: int = 0
    finished: bool = False

    @property
    def context(self) -> list[int]:
        return self.prompt + self.tokens

    def grow(self, tokens: Sequence[int], policy: int, finished: bool) -> None:
        drawn = len(tokens) - len(self.tokens)
        if drawn:
            self.versions.append((policy, drawn))
        self.tokens, self.finished = list(tokens), finished

    def stale_tokens(self, policy: int) -> int:
        return sum(count for version, count in self.versions if version != policy)


@dataclass(frozen=True)
class Wave:
    """`may_be_left` rows need not finish, `awaited` must."""

    rows: list[Row]
    may_be_left: int
    awaited: frozenset[int]

    def enough(self, running: Sequence[int]) -> bool:
        """True if the wave may end while these rows run."""
        return len(running) <= self.may_be_left and not self.awaited.intersection(running)


class Pool:
    """Rows in the order drawn.  A step: `admit`, `begin`, `next_wave` and `take` in turns, `end`."""

    def __init__(self, max_staleness: int):
        self._max_staleness = max_staleness
        self.next_key = 0
        self.rows: list[Row] = []
        self._ready: list[Row] = []
        self._waves: list[list[Row]] = []
        self._decoded: list[Row] = []
        self._spare = self._total = 0

    def __len__(self) -> int:
        return len(self.rows)

    def new_keys(self, count: int) -> list[int]:
        first, self.next_key = self.next_key, self.next_key + count
        return list(range(first, first + count))

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        keys = self.new_keys(len(prompts))
        self.rows += [Row(key, list(prompt)) for key, prompt in zip(keys, prompts, strict=True)]

    def restore(self, rows: Sequence[Row], next_key: int) -> None:
        self.rows, self.next_key = list(rows), next_key

    def flush(self) -> list[Row]:
        given_up, self.rows = self.rows, []
        return given_up

    def begin(self, batch: int, width: int) -> None:
        assert len(self.rows) >= batch, (len(self.rows), batch)
        self._ready = [row for row in self.rows if row.finished]
        running = [row for row in self.rows if not row.finished]
        carried = sorted((row for row in running if row.tokens), key=lambda row: len(row.context))
        new = [row for row in running if not row.tokens]
        self._waves = [part[i : i + width] for part in (carried, new) for i in range(0, len(part), width)]
        self._spare, self._total, self._decoded = len(self.rows) - batch, len(running), []

    def next_wave(self) -> Wave:
        """Return rows to decode; `decoded` must follow."""
        rows = self._waves.pop(0)
        started = len(self._decoded) + len(rows)
        left = sum(not row.finished for row in self._decoded)
        awaited = frozenset(i for i, row in enumerate(rows) if row.deferrals >= self._max_staleness)
        return Wave(rows, max(0, self._spare * started // self._total - left), awaited)

    def decoded(self, wave: Wave, ends: Sequence[int]) -> None:
        """Record a wave; `ends`: end positions."""
        self._decoded += wave.rows
        done = [i for i, row in enumerate(wave.rows) if row.finished]
        self._ready += [wave.rows[i] for i in sorted(done, key=lambda i: (ends[i], wave.rows[i].key))]

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def take(self, count: int) -> list[Row]:
        taken, self._ready = self._ready[:count], self._ready[count:]
        keys = {row.key for row in taken}
        self.rows = [row for row in self.rows if row.key not in keys]
        return sorted(taken, key=lambda row: row.key)

    def end(self) -> None:
        """Defer the remaining rows."""
        for row in self.rows:
            row.deferrals += bool(row.tokens)


def share_of(delta: int, replica: int, replicas: int) -> int:
    """Parts differ by one at most."""
    return delta * (replica + 1) // replicas - delta * replica // replicas


def room(drawn: int, epoch: int, batch: int) -> int:
    """Prompts that a replica may still hold or draw."""
    return max(epoch - drawn % epoch, batch)
