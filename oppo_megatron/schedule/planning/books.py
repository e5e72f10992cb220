"""Each role's cached and computed tokens of every rollout, kept alike on all ranks that plan a round with it.  Pure.

A book assigns sequences to replicas and cache slots, and says what each micro-batch of the coming round adds; the caches
themselves follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import pack_by_tokens
from oppo_megatron.schedule.rounds import Batch, Growth
from oppo_megatron.schedule.weaving.cut import even_portions

Pairs = list[tuple[int, int]]
"""A mapping of numbers as JSON keeps it: keys stay numbers, and their order stays."""


def pairs(mapping: Mapping[int, int]) -> Pairs:
    return list(mapping.items())


@dataclass
class ReplicaWork:
    """What a round asks of one replica's cache: close, then open, then prefill; `done` is closed at the end."""

    evict: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    prefill: list[Batch] = field(default_factory=list)
    decode: list[Batch] = field(default_factory=list)
    done: list[int] = field(default_factory=list)


class Replicas:
    """Each sequence's replica, where it stays until it leaves.  `slots`: the number of slots of one replica's cache."""

    def __init__(self, num_replicas: int, slots: int):
        self._num_replicas, self._slots = num_replicas, slots
        self._of: dict[int, int] = {}

    def of(self, seq_id: int) -> int:
        """The sequence's replica, which it was given by `place`."""
        return self._of[seq_id]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._of

    def place(self, held: Sequence[Rollout]) -> None:
        """Give a replica to each of `held` that has none; `held` are all that the replicas have to do with now.

        The longest first (ties: the first of `held`), each to the replica that holds the fewest tokens, prompts and
        responses so far (ties: the fewest sequences, then the first), among those that have slots for it: beyond this
        round, in which finished sequences still have theirs, and in this round.  Where none has, to one of the least
        crowded.
        """
        new = [r for r in held if r.seq_id not in self._of]
        if not new:
            return
        parts = [_Part(replica, self._slots) for replica in range(self._num_replicas)]
        for rollout in held:
            if rollout.seq_id in self._of:
                parts[self._of[rollout.seq_id]].add(rollout)
        for rollout in sorted(new, key=lambda r: -r.num_tokens):
            part = min(parts, key=lambda p: p.rank_for(rollout))
            part.add(rollout)
            self._of[rollout.seq_id] = part.replica

    def remove(self, seq_id: int) -> None:
        """The sequence has left."""
        self._of.pop(seq_id, None)

    def state_dict(self) -> Pairs:
        """[sequence, replica] of each, in plain JSON types."""
        return pairs(self._of)

    def load_state_dict(self, state: Pairs) -> None:
        self._of = dict(state)


@dataclass
class _Part:
    """What one replica holds."""

    replica: int
    slots: int
    tokens: int = 0
    sequences: int = 0
    unfinished: int = 0

    def add(self, rollout: Rollout) -> None:
        self.tokens += rollout.num_tokens
        self.sequences += 1
        self.unfinished += not rollout.finished

    def rank_for(self, rollout: Rollout) -> tuple[int, ...]:
        """The replica with the smallest takes the rollout."""
        staying = self.unfinished + (not rollout.finished)
        crowded = max(0, staying - self.slots), max(0, self.sequences + 1 - self.slots)
        return *crowded, self.tokens, self.sequences, self.replica


class Book:
    """What the books of all roles have: `slots` of each replica's cache, and who has one."""

    def __init__(self, replicas: int, slots: int):
        self.slots = slots
        self._replicas = Replicas(replicas, slots)
        self._cached: list[dict[int, int]] = [{} for _ in range(replicas)]  # open sequences -> tokens cached

    def __len__(self) -> int:
        """Replicas."""
        return len(self._cached)

    def replica(self, seq_id: int) -> int:
        """The replica that the sequence belongs to, once a round with it has been planned."""
        return self._replicas.of(seq_id)

    def num_open(self, replica: int) -> int:
        """Sequences that have a slot beyond the round planned last."""
        return len(self._cached[replica])

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, in plain JSON types: each sequence's replica and its cached tokens."""
        return {"replicas": self._replicas.state_dict(), "cached": [pairs(cached) for cached in self._cached]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the caches hold what it says."""
        self._replicas.load_state_dict(state["replicas"])
        self._cached = [dict(cached) for cached in state["cached"]]

    def cached(self, replica: int) -> Mapping[int, int]:
        """Tokens cached of each sequence that has a slot."""
        return self._cached[replica]


class ScoringBook(Book):
    """The book of a scoring role.

    The reward model reads every token and gives one score at the last; reference and critic give an output for each
    response token t from position P + t - 1 (P prompt tokens), so they never read the last one.  A sequence's slot is
    freed when its outputs are complete.  With too few slots a finished sequence takes the place of the youngest
    unfinished one, which is prefilled again later; its outputs stay valid.
    """

    def __init__(self, role: str, replicas: int, slots: int):
        super().__init__(replicas, slots)
        self.role = role
        self.perishable = role == "critic"  # each update makes what it has computed stale
        self._outputs: dict[int, int] = {}

    def owes(self, rollouts: Iterable[Rollout]) -> bool:
        """Whether one of the rollouts has tokens that this role has not read."""
        return any(self._missing(r) for r in rollouts)

    def pending(self, rollouts: Iterable[Rollout]) -> list[list[int]]:
        """New tokens of each sequence that this role has not read, by replica."""
        self._replicas.place(self._unscored(rollouts))
        news: list[list[int]] = [[] for _ in self._cached]
        for rollout in rollouts:
            if self._missing(rollout):
                replica = self.replica(rollout.seq_id)
                news[replica].append(self._target(rollout) - self._cached[replica].get(rollout.seq_id, 0))
        return news

    def plan(self, rollouts: Sequence[Rollout], budget: int) -> list[ReplicaWork]:
        """The next micro-batches (at most `budget` tokens each) of every replica; the book counts them as done."""
        self._replicas.place(self._unscored(rollouts))
        works = [ReplicaWork() for _ in self._cached]
        for replica, work in enumerate(works):
            wanted = [r for r in rollouts if self.replica(r.seq_id) == replica and self._missing(r)]
            admitted = self._admit(wanted, replica, work)
            growths = [self._grow(r, self._cached[replica]) for r in admitted]
            bins = pack_by_tokens([g.new for g in growths], budget)
            work.prefill = [tuple(growths[i] for i in sorted(members)) for members in bins]
            work.done = [r.seq_id for r in admitted if r.finished]
            for seq_id in work.done:
                del self._cached[replica][seq_id]
        return works

    def forget(self, seq_id: int) -> None:
        """The sequence has been trained."""
        assert seq_id not in self._cached[self.replica(seq_id)], f"{self.role}: sequence {seq_id} was trained unscored"
        self._outputs.pop(seq_id, None)
        self._replicas.remove(seq_id)

    def reset(self) -> None:
        """The weights changed: nothing that is cached or computed is valid any more."""
        self._outputs.clear()
        for cached in self._cached:
            cached.clear()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"outputs": pairs(self._outputs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._outputs = dict(state["outputs"])

    def outputs(self, replica: int) -> Mapping[int, int]:
        """How many outputs each sequence of the replica has, where it has any."""
        return {seq_id: count for seq_id, count in self._outputs.items() if count and self.replica(seq_id) == replica}

    def _target(self, rollout: Rollout) -> int:
        """Tokens of the sequence that this role has use for now."""
        return rollout.num_tokens - (self.role != "reward")

    def _missing(self, rollout: Rollout) -> bool:
        if rollout.finished:
            return self._outputs.get(rollout.seq_id, 0) < (1 if self.role == "reward" else len(rollout.tokens))
        seq_id = rollout.seq_id
        cached = self._cached[self.replica(seq_id)].get(seq_id, 0) if seq_id in self._replicas else 0
        return cached < self._target(rollout)

    def _unscored(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Those that this role has, or will have, something to read of."""
        return [r for r in rollouts if not r.finished or self._missing(r)]

    def _admit(self, rollouts: list[Rollout], replica: int, work: ReplicaWork) -> list[Rollout]:
        """Those of the rollouts that have a slot or get one now.  A finished one may take that of an unfinished one."""
        cached, finished = self._cached[replica], {r.seq_id for r in rollouts if r.finished}
        youngest = sorted(seq_id for seq_id in cached if seq_id not in finished)
        for rollout in sorted(rollouts, key=lambda r: not r.finished):
            if rollout.seq_id in cached:
                continue
            if len(cached) == self.slots and rollout.finished and youngest:
                work.evict.append(youngest.pop())
                del cached[work.evict[-1]]
            if len(cached) < self.slots:
                cached[rollout.seq_id] = 0
                work.open.append(rollout.seq_id)
        return [r for r in rollouts if r.seq_id in cached]

    def _grow(self, rollout: Rollout, cached: dict[int, int]) -> Growth:
        seq_id, past, target = rollout.seq_id, cached[rollout.seq_id], self._target(rollout)
        if self.role == "reward":
            rows = int(rollout.finished)
        else:
            first = len(rollout.prompt.tokens) - 1 + self._outputs.get(seq_id, 0)
            rows = max(0, target - max(first, past))
        self._outputs[seq_id] = self._outputs.get(seq_id, 0) + rows
        cached[seq_id] = target
        return Growth(seq_id, past, target - past, rows)


class ActorBook(Book):
    """The book of the decoding actor.

    Between rounds an open sequence has all but its last token cached, unless its cache is stale: then the next round
    begins with its prefill.  One that is kept beyond updates has outlived so many: what is drawn over it is of weights as
    old.  With too few slots, or memory for `most` in a micro-batch only, those admitted first run, and
    the others wait for the next round.
    """

    def __init__(self, replicas: int, slots: int, limit: Callable[[int], int]):
        """`limit(seq_id)`: the most response tokens that the sequence may have."""
        super().__init__(replicas, slots)
        self._limit = limit
        self.most: int | None = None  # sequences of a decode micro-batch, where memory allows no more
        self._waiting: set[int] = set()  # that have a slot, and did not run in the round planned last
        self._outlived: dict[int, int] = {}  # updates since an open sequence's cache was begun, where there were any

    def running(self, active: Sequence[Rollout]) -> list[int]:
        """How many sequences each replica will decode in the next round."""
        self._replicas.place(active)
        held = [0] * len(self._cached)
        for rollout in active:
            held[self.replica(rollout.seq_id)] += 1
        return [min(count, self.slots) for count in held]

    def steps(self, active: Sequence[Rollout], chunk: int) -> int:
        """Decode steps of the next round: a chunk, or less where no sequence may grow by as much."""
        return min(chunk, max((self._room(r) for r in active), default=0))

    def plan(
        self,
        active: Sequence[Rollout],
        steps: int,
        micro_batches: int,
        budget: int,
        order: Callable[[Sequence[int]], list[int]],
    ) -> list[ReplicaWork]:
        """What each replica prefills and decodes.

        `order(seq_ids)` puts open sequences in the order of their cache slots where this rank holds them.
        """
        self._replicas.place(active)
        self._waiting = set()
        works = []
        for replica, cached in enumerate(self._cached):
            held = [r for r in active if self.replica(r.seq_id) == replica]
            bound = len(held) if self.most is None else self.most * micro_batches
            mine = {r.seq_id: r for r in held[:bound]}
            self._waiting |= {r.seq_id for r in held[bound:]}
            work = ReplicaWork(open=[i for i in mine if i not in cached][: self.slots - len(cached)])
            running = [mine[i] for i in [*order([i for i in cached if i in mine]), *work.open]]
            cached.update(dict.fromkeys(work.open, 0))
            stale = [Growth(r.seq_id, cached[r.seq_id], r.num_tokens - 1 - cached[r.seq_id]) for r in running]
            stale = [g for g in stale if g.new]
            bins = pack_by_tokens([g.new for g in stale], budget)
            work.prefill = [tuple(stale[i] for i in sorted(members)) for members in bins]
            growths = [Growth(r.seq_id, r.num_tokens - 1, min(steps, self._room(r))) for r in running]
            work.decode = [tuple(portion) for portion in even_portions(growths, micro_batches)]
            works.append(work)
        return works

    def record(self, rollouts: Iterable[Rollout]) -> None:
        """A round has been recorded in the rollouts."""
        for rollout in rollouts:
            cached = self._cached[self.replica(rollout.seq_id)]
            if rollout.seq_id not in cached or rollout.seq_id in self._waiting:
                continue
            if rollout.finished:
                del cached[rollout.seq_id]
                self._replicas.remove(rollout.seq_id)
                self._outlived.pop(rollout.seq_id, None)
            else:
                cached[rollout.seq_id] = rollout.num_tokens - 1

    def invalidate(self) -> None:
        """The weights changed: caches must be computed again."""
        for cached in self._cached:
            cached.update(dict.fromkeys(cached, 0))
        self._outlived = {}

    def keep(self) -> None:
        """The weights changed, and what is cached is kept."""
        for cached in self._cached:
            for seq_id in (each for each, count in cached.items() if count):
                self._outlived[seq_id] = self._outlived.get(seq_id, 0) + 1

    @property
    def outlived(self) -> Mapping[int, int]:
        """Updates that were made since the cache of a sequence was begun; 0 of one that is not there."""
        return self._outlived

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"outlived": pairs(self._outlived)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._outlived = dict(state.get("outlived") or [])  # older checkpoints have none

    def _room(self, rollout: Rollout) -> int:
        return self._limit(rollout.seq_id) - len(rollout.tokens)
