"""Runs a schedule's lists on values (hashes of their inputs), to judge the checker; it knows no rule about schedules.
A schedule is harmful if a rank hangs or lacks input, a message is left over, or a value differs from `reference`."""

from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Batch, Round, Site


class Harm(Exception):
    """The schedule cannot be carried out, or not as it should be."""


@dataclass
class State:
    """The final state of a rank: caches, scores, `books[sequence]` of drawn tokens, and the `chunk` (None: nobody tells it)."""

    caches: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    scores: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    books: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    chunk: Any = None


def _first_input(role: str, seq_id: int, past: int, new: int) -> int:
    return hash(("tokens", role, seq_id, past, new))


def _next_input(seq_id: int, book: list[int]) -> int:
    return book[-1] if book else hash(("last prompt token", seq_id))


def _layer(state: State, role: str, stage: int, seq_id: int, value: int) -> int:
    """A stage's work on one sequence: the output depends on the cache, and the cache grows by the input."""
    past = state.caches[role].get(seq_id, hash(("cached before", role, stage, seq_id)))
    state.caches[role][seq_id] = hash(("cache", past, value))
    return hash(("out", stage, past, value))


def _snapshot(books: dict[int, list[int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple(sorted((seq_id, tuple(tokens)) for seq_id, tokens in books.items() if tokens))


def reference(round_: Round, site: Site) -> dict[int, State]:
    states = {rank: State() for placement in site.placements.values() for rank in placement.ranks}
    stages: dict[tuple[str, int, int], State] = defaultdict(State)  # one for all tensor ranks
    for role, replicas in round_.prefill.items():
        for replica, batches in enumerate(replicas):
            for m, batch in enumerate(batches):
                values = [_first_input(role, g.seq_id, g.past, g.new) for g in batch]
                for stage in range(site.placements[role].pp):
                    at = stages[role, replica, stage]
                    values = [_layer(at, role, stage, g.seq_id, v) for g, v in zip(batch, values, strict=True)]
                if role != "actor":
                    stages[role, replica, site.placements[role].pp - 1].scores[role, m] = values
    actor, chunk = site.placements["actor"], dict[int, list[int]]()
    for replica, batches in enumerate(round_.decode):
        books: dict[int, list[int]] = defaultdict(list)
        for _ in range(round_.steps):
            for batch in batches:
                values = [_next_input(g.seq_id, books[g.seq_id]) for g in batch]
                for stage in range(actor.pp):
                    at = stages["actor", replica, stage]
                    drawn = [_next_input(g.seq_id, books[g.seq_id]) for g in batch]
                    inputs = [hash(pair) for pair in zip(values, drawn, strict=True)]
                    values = [_layer(at, "actor", stage, g.seq_id, v) for g, v in zip(batch, inputs, strict=True)]
                for growth, value in zip(batch, values, strict=True):
                    books[growth.seq_id].append(hash(("drawn", value)))
        for stage in range(actor.pp):
            stages["actor", replica, stage].books = books
        chunk |= books
    for rank, state in states.items():
        for role, placement in site.placements.items():
            coords = placement.coords(rank)
            if coords is not None:
                at = stages[role, coords.replica, coords.stage]
                for own, theirs in (state.caches, at.caches), (state.scores, at.scores), (state.books, at.books):
                    own.update(theirs)
        if round_.steps and (rank in site.listeners or (rank in actor.ranks and actor.dp > 1)):
            state.chunk = _snapshot(chunk)
    return states


def harm(schedule: Schedule, round_: Round, site: Site) -> str | None:
    try:
        states = _Machine(schedule, round_, site).run()
    except Harm as error:
        return str(error)
    for rank, expected in reference(round_, site).items():
        for what in ("caches", "scores", "chunk", "books"):
            got, due = getattr(states[rank], what), getattr(expected, what)
            if _snapshot(got) != _snapshot(due) if what == "books" else got != due:
                return f"rank {rank}: {what} differ"
    return None


class _Machine:
    def __init__(self, schedule: Schedule, round_: Round, site: Site):
        self.schedule, self.round, self.site = schedule, round_, site
        self.states = {rank: State() for placement in site.placements.values() for rank in placement.ranks}
        self.links: dict[object, deque[Any]] = defaultdict(deque)
        self.hidden: dict[object, list[int]] = {}
        self.meetings: dict[object, dict[int, Any]] = defaultdict(dict)
        self.met: dict[tuple[object, int], int] = defaultdict(int)

    def run(self) -> dict[int, State]:
        ranks = {rank: self._rank(rank) for rank in self.states}
        while ranks:
            moved = False
            for rank, steps in list(ranks.items()):
                for went_on in steps:
                    moved = moved or went_on
                    if not went_on:
                        break
                else:
                    del ranks[rank]
                    moved = True
            if not moved:
                raise Harm(f"ranks {sorted(ranks)} hang")
        if any(self.links.values()):
            raise Harm("a message is left over")
        return self.states

    def _rank(self, rank: int) -> Iterator[bool]:
        for action in self.schedule.of(rank):
            placement = self.site.placements[action.role]
            coords = placement.coords(rank)
            if action.op is Op.SEND:
                self._send(action)
                yield True
            elif action.op is Op.RECV:
                link = self.links[action.peer, rank, action.role, action.payload]
                while not link:
                    yield False
                self._take(action, coords, link.popleft())
                yield True
            elif action.op is Op.GATHER:
                yield from self._gather(action)
            else:
                assert coords is not None
                yield from self._compute(action, coords)

    def _meet(self, group: tuple[int, ...], name: object, rank: int, brought: Any) -> Generator[bool, None, dict[int, Any]]:
        """Every rank of the group comes, and has what each has brought; the n-th call of each belongs together."""
        self.met[name, rank] += 1
        meeting = self.meetings[name, self.met[name, rank]]
        meeting[rank] = brought
        while len(meeting) < len(group):
            yield False
        yield True
        return meeting

    def _place_of_hidden(self, action: Action) -> object:
        """A scorer holds one hidden state, the actor one of each micro-batch."""
        return (action.rank, action.role, action.micro_batch if action.role == "actor" else None)

    def _send(self, action: Action) -> None:
        state = self.states[action.rank]
        if action.payload is Payload.HIDDEN:
            content: Any = self.hidden.get(self._place_of_hidden(action))
            if content is None:
                raise Harm(f"{action}: there is nothing to send")
        elif action.payload is Payload.TOKENS:
            books = [state.books[g.seq_id] for g in self._batch(action)]
            if not all(books):
                raise Harm(f"{action}: there is nothing to send")
            content = [book[-1] for book in books]
        else:
            content = state.chunk if state.chunk is not None else _snapshot(state.books)
        self.links[action.rank, action.peer, action.role, action.payload].append(content)

    def _take(self, action: Action, coords: RankCoordinates | None, content: Any) -> None:
        state = self.states[action.rank]
        if action.payload is Payload.HIDDEN:
            self.hidden[self._place_of_hidden(action)] = content
        elif action.payload is Payload.TOKENS:
            self._append(state, self._batch(action), content)
        else:
            state.chunk = content

    def _append(self, state: State, batch: Batch, tokens: list[int]) -> None:
        for growth, token in zip(batch, tokens, strict=True):
            state.books[growth.seq_id].append(token)

    def _gather(self, action: Action) -> Iterator[bool]:
        state, placement = self.states[action.rank], self.site.placements["actor"]
        brought = yield from self._meet(placement.ranks, "gather", action.rank, _snapshot(state.books))
        coords = placement.coords(action.rank)
        assert coords is not None
        column = [placement.rank(replica, coords.stage, coords.shard) for replica in range(placement.dp)]
        state.chunk = tuple(sorted(row for rank in column for row in brought[rank]))

    def _batch(self, action: Action) -> Batch:
        coords = self.site.placements[action.role].coords(action.rank)
        assert coords is not None
        if action.step is None:
            return self.round.prefill[action.role][coords.replica][action.micro_batch]
        return self.round.decode[coords.replica][action.micro_batch]

    def _compute(self, action: Action, coords: RankCoordinates) -> Iterator[bool]:
        placement, rank = self.site.placements[action.role], action.rank
        group = placement.stage_ranks(coords.replica, coords.stage)
        own = self._input(action, coords)
        called = (action.op, action.micro_batch, action.step, own)
        brought = yield from self._meet(group, (action.role, group), rank, called)
        if any(other != called for other in brought.values()):
            raise Harm(f"{action}: its tensor ranks meet at different actions or with different values")
        self._work(action, coords, own)
        yield True

    def _input(self, action: Action, coords: RankCoordinates) -> list[int]:
        batch, state = self._batch(action), self.states[action.rank]
        held = self.hidden.get(self._place_of_hidden(action))
        if action.op in (Op.SAMPLE, Op.SCORE) or coords.stage > 0:
            if held is None:
                raise Harm(f"{action}: there is nothing to work on")
            values = held
        elif action.op is Op.DECODE:
            values = [_next_input(g.seq_id, state.books[g.seq_id]) for g in batch]
        else:
            values = [_first_input(action.role, g.seq_id, g.past, g.new) for g in batch]
        if action.op is Op.DECODE:
            drawn = [_next_input(g.seq_id, state.books[g.seq_id]) for g in batch]
            values = [hash(pair) for pair in zip(values, drawn, strict=True)]
        return values

    def _work(self, action: Action, coords: RankCoordinates, values: list[int]) -> None:
        batch, state = self._batch(action), self.states[action.rank]
        if action.op is Op.SAMPLE:
            self._append(state, batch, [hash(("drawn", value)) for value in values])
        elif action.op is Op.SCORE:
            if (action.role, action.micro_batch) in state.scores:
                raise Harm(f"{action}: the outputs are there already")
            state.scores[action.role, action.micro_batch] = values
        else:
            pairs = zip(batch, values, strict=True)
            out = [_layer(state, action.role, coords.stage, g.seq_id, value) for g, value in pairs]
            self.hidden[self._place_of_hidden(action)] = out
