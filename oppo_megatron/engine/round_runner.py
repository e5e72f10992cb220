"""One rank's part in the rounds of a run, and decoding whole responses (`PromptDecoder`: evaluation, `oppo generate`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch.distributed as dist

from oppo_megatron.chunks import Chunk, Orders, StopSignal
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.columns import Held, Ints, columns_of
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.engine.device_decode import SYNC_STEPS
from oppo_megatron.engine.executor import Executor, Links, build_links
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import ChunkBooks, ListenWorker
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.links import most_streams, transport_of
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.planning.planner import PlannedRound, RoundPlanner
from oppo_megatron.schedule.rounds import Batch, Site


@dataclass(frozen=True)
class Decoding:
    clock: int  # decode steps of the run before this round
    version: int  # of the policy, recorded with each token
    readiness: Callable[[], StopSignal]  # returns a new tracker of the batch's completion
    orders: Orders = Orders.NONE  # of this rank


@dataclass
class RoundRunner:
    """One rank's workers and planner.  Each round: call `run`, add the chunk to the rollouts, then call `recorded`."""

    planner: RoundPlanner
    executor: Executor
    replicas: Mapping[str, int]  # this rank's replica of each of its roles
    decode: DecodeWorker | None  # on ranks with the actor
    listen: ListenWorker | None  # on all other ranks: receives the chunks
    scoring: Mapping[str, ScoringWorker] = field(default_factory=dict)
    on_plan: Callable[[PlannedRound], None] | None = None
    num_rounds: int = 0
    planning_s: float = 0.0  # spent on planning so far

    def run(
        self, active: Sequence[Rollout], score: Sequence[Rollout], chunk_tokens: int, decoding: Decoding,
        readable: Ints | None = None,
    ) -> Chunk | None:  # fmt: skip
        """Decode at most `chunk_tokens` tokens of each of `active`; score new tokens of `score` (critic: only ids in `readable`).

        Returns the chunk, None without `active`.  Raises ScheduleError before anything runs; StallError, CapacityError.
        """
        self.num_rounds += 1
        order = self.decode.order if self.decode is not None else list
        started = time.monotonic()
        planned = self.planner.plan(self.num_rounds, active, score, chunk_tokens, order, readable)
        self.planning_s += time.monotonic() - started
        if self.on_plan is not None:
            self.on_plan(planned)
        scoring = {name: worker for name, worker in self.scoring.items() if name in planned.works}
        for name, worker in scoring.items():
            read = planned.works[name][self.replicas[name]]
            worker.begin(read, grown(read.prefill, score))
        if self.decode is not None and active:
            mine: ReplicaWork = planned.works["actor"][self.replicas["actor"]]
            self.decode.begin(
                mine, grown(mine.decode, active), decoding.readiness, index=planned.round.index, clock=decoding.clock,
                version=decoding.version, orders=decoding.orders, outlived=self.planner.actor.outlived,
            )  # fmt: skip
        self.executor.run(planned.schedule.of(self.executor.rank), shift=planned.round.index - 1)
        for worker in scoring.values():
            worker.end()
        if not active:
            return None
        end = self.decode or self.listen
        assert end is not None
        return end.end()

    def recorded(self, rollouts: Sequence[Rollout]) -> None:
        """Update the actor's book, after the chunk was added to the rollouts."""
        self.planner.actor.record(rollouts)

    def owes(self, rollouts: Sequence[Rollout], role: str | None = None) -> bool:
        """True if a scorer (or `role`) has unread tokens."""
        return self.planner.owes(rollouts) if role is None else self.planner.scorers[role].owes(rollouts)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        if self._stream is not None:
            self._stream.admit(rollouts)

    def retire(self, rollouts: Sequence[Rollout]) -> None:
        """Forget a scored batch."""
        if self._stream is not None:
            self._stream.retire(rollouts)
        seq_ids = [rollout.seq_id for rollout in rollouts]
        for book in self.planner.scorers.values():
            book.forget(*seq_ids)
        for worker in self.scoring.values():
            for seq_id in seq_ids:
                worker.forget(seq_id)

    def give_up(self, rollouts: Sequence[Rollout]) -> None:
        """Forget rollouts that will not be trained, read or not."""
        seq_ids = [rollout.seq_id for rollout in rollouts]
        for book in self.planner.scorers.values():
            book.forget(*seq_ids, unread=True)
        for worker in self.scoring.values():
            worker.give_up(*seq_ids)
        self.retire(rollouts)

    def cut(self, rewritten: Sequence[Rollout], kept: Sequence[int]) -> None:
        """Forget what was computed of responses beyond the `kept` tokens, after which they were `rewritten` (never whole)."""
        columns = columns_of(rewritten)
        before = columns._replace(response_tokens=np.array(kept, dtype=np.int64))
        for name, book in self.planner.scorers.items():
            book.cut(before)
            worker = self.scoring.get(name)
            if worker is not None:
                replica = self.replicas[name]
                cached, outputs = book.cached(replica), book.outputs(replica)
                for seq_id in before.seq_ids.tolist():
                    worker.cut(seq_id, cached.get(seq_id, 0), outputs.get(seq_id, 0))
        self.planner.actor.record(rewritten)
        if self.decode is not None:
            self.decode.leave(*(rollout.seq_id for rollout in rewritten if rollout.finished))
        if self._stream is not None:
            self._stream.retire(rewritten)
            self._stream.admit(rewritten)

    def actor_changed(self) -> None:
        self.planner.actor.invalidate()
        if self.decode is not None:
            self.decode.invalidate()

    def scorers_changed(self) -> None:
        for name in self.planner.reset_perishable():
            if name in self.scoring:
                self.scoring[name].reset()

    @property
    def _stream(self) -> ChunkBooks | None:
        return self.listen if self.decode is None else self.decode.outlet


def grown(batches: Sequence[Batch], rollouts: Sequence[Rollout]) -> list[Rollout]:
    by_id = rollouts.by_id if isinstance(rollouts, Held) else {rollout.seq_id: rollout for rollout in rollouts}
    return [by_id[growth.seq_id] for batch in batches for growth in batch]


def decoder(
    model: RoleModel, cache: SequenceCache, *, sampling: Sampling, stopping: Stopping, micro_batch_tokens: int,
    timeout_s: float, links: Links | None = None, sync_steps: int = 1, activity: Activity | None = None,
) -> RoundRunner:  # fmt: skip
    """Return a runner that only decodes."""
    groups = model.groups
    placement = RolePlacement(groups.ranks, groups.tp, groups.pp, groups.dp)
    rank = dist.get_rank()
    coords = placement.coords(rank)
    assert coords is not None, "only ranks that hold the model decode with it"
    worker = DecodeWorker(model, cache, sampling=sampling, stopping=stopping, sync_steps=sync_steps)
    book = ActorBook(placement.dp, cache.num_slots, stopping.limit)
    site = Site({"actor": placement})
    planner = RoundPlanner(
        site, "sequential", ("auto", "auto"), micro_batch_tokens, cache.max_length, book, {}, rank=rank,
        transport=transport_of(cache.device.type, os.environ, most_streams(site)),
    )  # fmt: skip
    executor = Executor(
        rank, {"actor": worker}, links or build_links(site), timeout_s, cache.device, lambda *_: None, activity or Activity()
    )
    return RoundRunner(planner, executor, {"actor": coords.replica}, worker, None)


ROUND_STEPS = 64  # decode steps of a `PromptDecoder`'s round


class PromptDecoder:
    def __init__(
        self, model: RoleModel, links: Links, runtime: RuntimeConfig, *, num_slots: int, sampling: Sampling,
        stopping: Stopping, round_steps: int = ROUND_STEPS, activity: Activity | None = None,
    ):  # fmt: skip
        """Decodes `num_slots` sequences per replica (fewer if `runtime.kv_cache_mb` is small); ended ones leave each round."""
        self._model, self._links, self._runtime, self._activity = model, links, runtime, activity
        self._num_slots = num_slots
        self.sampling, self.stopping, self.round_steps = sampling, stopping, round_steps
        self._rounds: RoundRunner | None = None
        self._clock = 0

    def decode(self, prompts: Iterable[Prompt]) -> Iterator[Rollout]:
        """Yield responses as they end.  Raises CapacityError."""
        for rollouts in self.rounds(prompts):
            yield from sorted((r for r in rollouts if r.finished), key=lambda r: (r.finish_clock, r.seq_id))

    def rounds(self, prompts: Iterable[Prompt]) -> Iterator[list[Rollout]]:
        """Yield the running rollouts after each round; a caller that stops early abandons them."""
        rounds, waiting = self._rounds, iter(prompts)
        if rounds is None:
            runtime = self._runtime
            cache = self._model.new_cache(self._num_slots, runtime.kv_budget_bytes, runtime.kv_layout)
            rounds = decoder(
                self._model, cache, sampling=self.sampling, stopping=self.stopping, links=self._links,
                micro_batch_tokens=runtime.micro_batch_tokens, timeout_s=runtime.timeout_s,
                sync_steps=SYNC_STEPS[cache.device.type], activity=self._activity,
            )  # fmt: skip
        assert rounds.decode is not None
        self._rounds = None  # a caller that stops early leaves its sequences in these caches and books
        places = rounds.decode.cache.num_slots * self._model.groups.dp
        active: list[Rollout] = []
        while True:
            active = [r for r in active if not r.finished]
            active += [Rollout(prompt, admission=0) for prompt in islice(waiting, places - len(active))]
            if not active:
                break
            decoding = Decoding(self._clock, 0, partial(AllEnded, active))
            chunk = rounds.run(active, [], self.round_steps, decoding)
            assert chunk is not None
            self._clock, by_id = chunk.clock, {r.seq_id: r for r in active}
            for row in chunk.rows:
                by_id[row.seq_id].extend(row)
            rounds.recorded(active)
            yield active
        rounds.executor.finish_sends()
        self._rounds = rounds


class AllEnded:
    def __init__(self, active: Sequence[Rollout]):
        self._going_on = {r.seq_id for r in active}

    @property
    def ready(self) -> bool:
        return not self._going_on

    def finish(self, *seq_ids: int) -> None:
        assert self._going_on.issuperset(seq_ids)
        self._going_on.difference_update(seq_ids)
