"""One rank's rounds without models: its own plan of each, and the sizes of its messages.

Adds to the pure half of the loop (`dry_run.py`) what the caches of a rank decide: the slots of its replica's sequences, so
their order in micro-batches, and the decode micro-steps that are void because their sequences have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.agreement import OwnPlan, Records
from benchmarks.dry_run import DryRun
from oppo_megatron.chunks import FIELDS, UNFINISHED, Chunk, StopSignal
from oppo_megatron.columns import columns_of
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.stream import DRAWN, HEADER_SIZE, ROW_SIZE
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.layout.shape import DTYPE_BYTES
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Batch, Round, Site
from oppo_megatron.sim.runs.loop import Growing

WORD = 8
GATHER_CALLS = 2  # lengths, then rows as long as the longest

Rows = tuple[tuple[int, ...], ...]
"""Running sequences of each decode micro-batch in each micro-step that is not void."""


@dataclass(frozen=True)
class RankRound:
    """A round on one rank.  `chunk`: its rows and tokens; `rows`: of the rank's replica."""

    step: int
    plan: OwnPlan
    rows: Rows
    chunk: tuple[int, int] | None


class RankRun(DryRun):
    """The rounds of `rank`, which it plans for itself.

    `results`: bytes of the broadcasts of each step that give the scorers' results to all ranks: each role's outputs by replica,
    then the rewards.
    """

    def __init__(
        self, config: TrainConfig, prompt_tokens: int | Sequence[int], rank: int, responses: Callable[[int], int] | None = None
    ):
        super().__init__(config, prompt_tokens, rank, responses=responses, codec=False)
        self.actor = self.site.placements["actor"]
        self.coords = self.actor.coords(rank)
        self.slots = Slots()
        self.results: list[list[int]] = []
        self._records: Records = ()
        self._rows: Rows = ()

    def rank_rounds(self) -> Iterator[RankRound]:
        """Yield the rounds to the end of the prompts."""
        rank = self.planner.rank
        assert rank is not None
        for done in self.rounds():
            actions = done.planned.schedule.shifted(done.planned.round.index - 1).of(rank)
            chunk = None
            if done.chunk is not None:
                chunk = len(done.chunk.rows), done.chunk.rows.num_tokens
            yield RankRound(done.step, OwnPlan(self._records, done.planned.round, actions), self._rows, chunk)

    def _plan(self, active: Sequence[Rollout], score: Sequence[Rollout], *rest: Any) -> PlannedRound:
        known = dict[int, int]()
        for columns in map(columns_of, (active, score)):
            known |= zip(columns.seq_ids.tolist(), columns.num_tokens.tolist(), strict=True)
        self._records, self._rows = tuple(known.items()), ()
        return super()._plan(active, score, *rest)

    def _order(self, seq_ids: Sequence[int]) -> list[int]:
        return self.slots.order(seq_ids)

    def _decoded(self, planned: PlannedRound, active: Sequence[Rollout]) -> Growing:
        if self.coords is not None:
            work = planned.works["actor"][self.coords.replica]
            known = columns_of(active)
            ids = known.seq_ids.tolist()
            left = {i: self.length(i) - n for i, n in zip(ids, known.response_tokens.tolist(), strict=True)}
            stop = self.scheduler.buffer.readiness() if self.actor.dp == 1 else None
            self.slots.open(work.open)
            self._rows = self.slots.decode(work.decode, left, planned.round.steps, stop)
        return super()._decoded(planned, active)

    def _send(self, chunk: Chunk) -> None:
        """Remove finished sequences from the cache."""
        self.slots.close(chunk.rows.seq_ids[chunk.rows.finish_clocks != UNFINISHED].tolist())

    def _retire(self, step: int, batch: Sequence[Rollout]) -> None:
        self.results.append(list(self._results(batch)))
        super()._retire(step, batch)

    def _results(self, batch: Sequence[Rollout]) -> Iterator[int]:
        tokens = columns_of(batch).response_tokens
        for book in self.planner.scorers.values():
            each = tokens if book.every_token else np.ones_like(tokens)
            yield from (WORD * np.bincount(book.replicas(batch), each, len(book)).astype(np.int64)).tolist()
        yield WORD * len(batch) * (1 + len(self.config.rewards))


class Slots:
    """The slot of each sequence in a replica's cache: without gaps (`mcore/kv/sequence_cache.py`), running sequences of a round
    before those that ended in it (`engine/generation.py`).
    """

    def __init__(self) -> None:
        self._ids: list[int] = []

    def order(self, seq_ids: Sequence[int]) -> list[int]:
        """Return sequences in the order of their slots, then those without one."""
        slots = {seq_id: slot for slot, seq_id in enumerate(self._ids)}
        return sorted(seq_ids, key=lambda seq_id: slots.get(seq_id, len(slots)))

    def open(self, seq_ids: Sequence[int]) -> None:
        """Give slots to new sequences."""
        self._ids += seq_ids

    def close(self, seq_ids: Sequence[int]) -> None:
        """Free the slots of finished sequences; the last sequence moves into each gap."""
        for seq_id in reversed([seq_id for seq_id in self._ids if seq_id in set(seq_ids)]):
            slot, last = self._ids.index(seq_id), self._ids.pop()
            if slot < len(self._ids):
                self._ids[slot] = last

    def decode(self, batches: Sequence[Batch], left: Mapping[int, int], steps: int, stop: StopSignal | None) -> Rows:
        """Return the rows of up to `steps` micro-steps of each micro-batch; `left`: tokens that each sequence still gets.

        A micro-batch ends with its last sequence, or at `stop`, which only a single replica knows in time.
        """
        lanes, rows = [[growth.seq_id for growth in batch] for batch in batches], [list[int]() for _ in batches]
        going = list(range(len(lanes)))
        for step in range(steps):
            for m in list(going):
                rows[m].append(len(lanes[m]))
                for seq_id in [seq_id for seq_id in lanes[m] if left[seq_id] == step + 1]:
                    self._leave(lanes[m], seq_id)
                    if stop is not None:
                        stop.finish(seq_id)
                if not lanes[m] or (stop is not None and stop.ready):
                    going.remove(m)
        return tuple(map(tuple, rows))

    def _leave(self, lane: list[int], seq_id: int) -> None:
        """Move the last sequence of the micro-batch to the place of one that has ended, also in the cache."""
        last = lane[-1]
        lane[lane.index(seq_id)] = last
        lane.pop()
        one, other = self._ids.index(seq_id), self._ids.index(last)
        self._ids[one], self._ids[other] = last, seq_id


@dataclass
class Traffic:
    """`messages` and `num_bytes` by payload; `gathers`: collective calls, whose bytes are "gather"."""

    messages: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    gathers: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes in messages; the back end decides what collectives move."""
        return self.num_bytes.total() - self.num_bytes["gather"]


def token_bytes(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of one token's hidden state by role."""
    return {role: read_hf_config(model)["hidden_size"] * DTYPE_BYTES[model.dtype] for role, model in named_roles(config).items()}


@dataclass(frozen=True)
class Carried:
    """The content of one rank's messages in a round.  `new`: tokens of its replicas' prefill micro-batches by role."""

    rows: Rows
    new: Mapping[str, Sequence[int]]
    chunk: tuple[int, int] | None
    token_bytes: Mapping[str, int]

    @classmethod
    def of(cls, rank: int, made: RankRound, site: Site, token_bytes: Mapping[str, int]) -> Carried:
        """Return the content by the rank's own plan."""
        return cls(made.rows, dict(_prefilled(rank, made.plan.round, site)), made.chunk, token_bytes)

    def live(self, action: Action) -> bool:
        """True unless the executor skips the action because its micro-batch has ended."""
        return action.step is None or action.step < len(self.rows[action.micro_batch])

    def parts(self, action: Action) -> list[int]:
        """Return the bytes of each message of a send or receive."""
        if action.payload is Payload.CHUNK:
            assert self.chunk is not None
            rows, tokens = self.chunk
            payload = WORD * (ROW_SIZE * rows + DRAWN * tokens)
            return [WORD * HEADER_SIZE, *([payload] if payload else [])]
        rows = 0 if action.step is None else self.rows[action.micro_batch][action.step]
        if action.payload is Payload.TOKENS:
            return [WORD * DRAWN * rows]
        tokens = self.new[action.role][action.micro_batch] if action.step is None else rows
        return [tokens * self.token_bytes[action.role]]

    @property
    def words(self) -> int:
        """Words that the replica gives to a gather: the number of rows, their table, their tokens."""
        sequences = sum(own[0] for own in self.rows if own)
        return 1 + FIELDS * sequences + DRAWN * sum(map(sum, self.rows))


def _prefilled(rank: int, round_: Round, site: Site) -> Iterator[tuple[str, list[int]]]:
    for role, replicas in round_.prefill.items():
        coords = site.placements[role].coords(rank)
        if coords is not None:
            yield role, [sum(growth.new for growth in batch) for batch in replicas[coords.replica]]


def traffic_of(actions: Sequence[Action], carried: Carried, longest: int) -> Traffic:
    """Count one rank's actions.  `longest`: the most words that a replica of the actor gives to a gather."""
    traffic = Traffic()
    for action in actions:
        if action.op is Op.GATHER:
            traffic.gathers += GATHER_CALLS
            traffic.num_bytes["gather"] += WORD * (1 + longest)
        elif action.op is Op.SEND and carried.live(action):
            assert action.payload is not None
            parts = carried.parts(action)
            traffic.messages[action.payload.value] += len(parts)
            traffic.num_bytes[action.payload.value] += sum(parts)
    return traffic
