"""Builds this rank's models, caches, workers and trainer from checked configuration and inputs (`inputs.py`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.decode_gap import GapLimit
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import (
    batch_rows,
    longest_chunk,
    max_context,
    members,
    most_judged,
    num_updates,
    share_of_sequences,
)
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.model import KVLayout
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.engine.device_decode import SYNC_STEPS
from oppo_megatron.engine.executor import Executor, RoleWorker
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScorerRole, ScoringWorker
from oppo_megatron.engine.stopping import Quantile, Stopping
from oppo_megatron.engine.stream import ChunkOutlet, ListenWorker
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import named_roles, shares_weights
from oppo_megatron.mcore.kv.paged import find_kernel
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import DTYPES, RoleModel
from oppo_megatron.mcore.roles import as_it_began, load_role
from oppo_megatron.overcommit.ahead import NEW_RUN, Ahead
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.filter import GroupFilter, Rule, Scores
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.checking.transport import transport_of
from oppo_megatron.schedule.links import most_streams
from oppo_megatron.schedule.plan import cache_slots, delta_rule, new_planner, plan_step, round_generator
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.guard import Guard, Rollbacks
from oppo_megatron.train.inputs import Inputs, verdict_clock
from oppo_megatron.train.logs.journal import Journal
from oppo_megatron.train.logs.meter import RoundTracer, StepMeter
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.memory_meter import MemoryMeter
from oppo_megatron.train.roles import Topology, TrainedRole, build_topology, build_trained_role
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.saving.state import prompt_data, source_state
from oppo_megatron.train.score_exchange import ScoreExchange, StepRewards
from oppo_megatron.train.updates import Adaptation, Updates

SCORERS: dict[ScorerRole, Head] = {"reference": "lm", "critic": "scalar", "reward": "scalar"}


@dataclass
class RoleBuilder:
    config: TrainConfig
    algorithm: Algorithm
    world: World
    topology: Topology
    tokenizer: Tokenizer
    total_steps: int  # of the run
    lengths: Quantile | None  # of a length trace

    def __post_init__(self) -> None:
        """Settle the layout of the KV caches, because planner and caches must count slots the same way."""
        runtime, device = self.config.runtime, self.world.device
        if runtime.kv_layout == "auto":
            dtypes = {DTYPES[role.dtype] for role in named_roles(self.config).values()}
            layout: KVLayout = "dense" if any(find_kernel(device, dtype) is None for dtype in dtypes) else "paged"
            self.config = self.config.model_copy(update={"runtime": runtime.with_kv_layout(layout)})

        megabytes = runtime.kv_cache_mb
        self.kv_budget_bytes = None if megabytes is None else int(megabytes * 2**20)

    def num_slots(self, role: str) -> int:
        return share_of_sequences(self.config, role, self.topology.site.placements[role].dp)

    def actor(self) -> Actor | None:
        role = self._trained("actor", "lm")
        if role is None:
            return None
        config, temperature = self.config, self.config.rollout.temperature
        gap_limit = GapLimit.of(config.guards, config.actor.dtype, temperature)
        return Actor(role, self.algorithm, temperature, gap_limit=gap_limit)

    def critic(self) -> Critic | None:
        role = self._trained("critic", "scalar")
        return None if role is None else Critic(role, self.algorithm)

    def rounds(self, actor: Actor | None, critic: Critic | None, tracer: RoundTracer) -> RoundRunner:
        config, site = self.config, self.topology.site
        rank, device = self.world.rank, self.world.device
        decode = listen = None
        if actor is None:
            listen = ListenWorker(device)
        else:
            decode = DecodeWorker(
                actor.role.serving,
                self._cache("actor", actor.role.serving),
                sampling=Sampling.of(config.rollout, config.seed, members(config)),
                stopping=self._stopping,
                outlet=ChunkOutlet(device) if rank in site.feeds else None,
                sync_steps=SYNC_STEPS[device.type],
            )
        scoring = self._scoring_workers(actor, critic)
        planner = new_planner(
            config,
            site,
            round_generator(config.overlap, site),
            self._stopping.limit,
            rank=None if config.logging.trace == "actions" else rank,  # schedules.txt shows all ranks
            transport=transport_of(device.type, os.environ, most_streams(site)),
        )
        first: RoleWorker | None = decode if decode is not None else listen
        assert first is not None
        workers = {"actor": first, **scoring}
        executor = Executor(
            rank, workers, self.topology.links, config.runtime.timeout_s, device, tracer, self.world.activity,
            tracer.spans.clock,
        )  # fmt: skip
        places = {name: placement.coords(rank) for name, placement in site.placements.items()}
        coords_by_role = {name: coords.replica for name, coords in places.items() if coords is not None}
        return RoundRunner(planner, executor, coords_by_role, decode, listen, scoring, tracer.planned)

    @property
    def _stopping(self) -> Stopping:
        config, tokenizer = self.config, self.tokenizer
        return Stopping.of(config.rollout, tokenizer.eos_ids, config.seed, self.lengths, tokenizer.decode, config.rollout.lengths)

    @property
    def heldout_stopping(self) -> Stopping:
        """As in training, but without forced lengths."""
        return Stopping.of(self.config.rollout, self.tokenizer.eos_ids, self.config.seed, decode=self.tokenizer.decode)

    def _scoring_workers(self, actor: Actor | None, critic: Critic | None) -> dict[str, ScoringWorker]:
        config, workers = self.config, dict[str, ScoringWorker]()
        for name, head in SCORERS.items():
            groups = self.topology.groups.get(name)
            if groups is None:
                continue
            if name == "critic":
                assert critic is not None
                model = critic.role.serving
            elif name == "reference" and shares_weights(config):
                assert actor is not None
                model = as_it_began(actor.role.serving, groups, named_roles(config)[name])
            else:
                model = load_role(
                    named_roles(config)[name],
                    groups,
                    head=head,
                    role=name,
                    max_length=max_context(config),
                    device=self.world.device,
                ).requires_grad_(False)
            temperature = config.algorithm.temperature(config.rollout.temperature)
            workers[name] = ScoringWorker(name, model, self._cache(name, model), temperature=temperature)
        return workers

    def _trained(self, name: str, head: Head) -> TrainedRole | None:
        groups, training = self.topology.groups.get(name), self.topology.training.get(name)
        if groups is None or training is None:
            return None
        role = build_trained_role(
            self.config.trained[name],
            groups,
            training,
            head=head,
            name=name,
            max_length=max_context(self.config),
            device=self.world.device,
            num_updates=num_updates(self.config, name, self.total_steps),
        )
        for chunk in role.trained.chunks:  # every micro-batch of an update is a sign of life
            chunk.register_forward_pre_hook(lambda *_: self.world.activity.beat())
        return role

    def _cache(self, name: str, model: RoleModel) -> SequenceCache:
        cache = model.new_cache(self.num_slots(name), self.kv_budget_bytes, self.config.runtime.kv_layout)
        planned = cache_slots(self.config, name, self.topology.site.placements[name])
        assert cache.num_slots == planned, (name, cache.num_slots, planned)
        return cache


def build_loop(
    config: TrainConfig, world: World, inputs: Inputs, saver: Saver, rollbacks: Rollbacks, ahead: Ahead = NEW_RUN
) -> TrainingLoop:
    """Build this rank's groups, models, optimizers and books for the rest of the run (`ahead`)."""
    prompts = prompt_stream(config, inputs.prompts, ahead)
    total_steps = ahead.total_steps(config.steps, prompts.planned, batch_rows(config))
    with world.activity.doing("process groups", waits=True):
        topology = build_topology(config, world.device)
    algorithm, memory = Algorithm.of(config), MemoryMeter.begin(world.device)
    builder = RoleBuilder(config, algorithm, world, topology, inputs.tokenizer, total_steps, inputs.lengths)
    site = topology.site
    keeps_journal = world.rank == site.source
    tracer = _tracer(config, world.rank, site)
    trackers = open_trackers(config.logging, config.run_dir) if keeps_journal else None  # may refuse to begin
    journal = trackers and Journal(builder.config, total_steps, inputs.tokenizer, world.device, trackers)
    actor, critic = builder.actor(), builder.critic()
    rounds = builder.rounds(actor, critic, tracer)
    where: Literal["shared", "waited", "apart"] | None = None
    if config.critic is not None:
        where = "waited" if plan_step(config).wait_for_critic else "apart"
        if not set(site.placements["critic"].ranks).isdisjoint(site.placements["actor"].ranks):
            where = "shared"
    role = "scorer" if actor is None else "actor"
    meter = StepMeter(world, rounds, tracer.spans, tracer, memory, journal, role, where)
    guard = Guard(config, algorithm, world.rank, world.device, site, total_steps, rollbacks)
    scheduler, kl = _scheduler(config, prompts, ahead), KLController(config.ppo.kl)
    exchange = ScoreExchange(
        world.rank, world.device, site.placements, inputs.rewards, inputs.tokenizer, world.activity,
        members(config), actor, critic, StepRewards.of(config.rewards, inputs.tokenizer),
    )  # fmt: skip
    adaptation = Adaptation(
        world, scheduler, ChunkTuner(config.overlap.chunk_sizes, longest_chunk(config)), kl, rounds.planner, tracer.meter,
        tunes_chunk=config.overlap.intra, members=members(config),
    )  # fmt: skip
    updates = Updates(config, world, actor, critic, guard, kl, exchange, meter, saver.conclude, lambda: scheduler.position)
    groups = _filter(config, scheduler, inputs.rewards)
    rollouts = Rollouts(scheduler, rounds, exchange, config.overlap, lambda: meter.facts.planning(), groups)
    evaluator = None
    if inputs.heldout is not None and inputs.judges is not None:
        evaluator = Evaluator(
            config, inputs.heldout, inputs.judges, builder.heldout_stopping, builder.num_slots("actor"),
            builder.kv_budget_bytes, rounds, exchange,
        )  # fmt: skip
    return TrainingLoop(config, world, inputs.prompts, rollouts, exchange, updates, adaptation, evaluator, saver, meter)


def _scheduler(config: TrainConfig, prompts: PromptStream, ahead: Ahead) -> OvercommitScheduler:
    overlap, period = config.overlap, config.overlap.admission_period
    buffer = RolloutBuffer(
        batch_rows(config), 0, overlap.max_staleness, backfill=period is not None, group_size=members(config).size,
        filtered=config.filter is not None,
    )  # fmt: skip
    to_train = None if config.filter is None else ahead.to_train(config.steps, batch_rows(config))
    return OvercommitScheduler(prompts, buffer, make_delta_controller(delta_rule(overlap)), period, to_train)


def _tracer(config: TrainConfig, rank: int, site: Site) -> RoundTracer:
    schedules = RunDirectory(config.run_dir).schedules
    return RoundTracer(
        SpanRecorder(rank, config.run_dir if config.logging.trace else None),
        CostMeter({role: placement.pp for role, placement in site.placements.items()}),
        site,
        actions=config.logging.trace == "actions",
        schedules=schedules if config.logging.trace == "actions" and rank == site.source else None,
    )


def prompt_stream(config: TrainConfig, prompts: PromptSet, ahead: Ahead = NEW_RUN) -> PromptStream:
    """Return exactly the prompts to train: admission ends early enough that none is left over.

    With a filter their number is unknown, and the scheduler stops admission.
    """
    limit = None if config.filter is not None else ahead.limit(config.steps, batch_rows(config))
    return PromptStream(
        prompts, config.seed, epochs=config.passes, limit=limit, shuffle=config.data.shuffle,
        start=ahead.position, left_out=ahead.left_out,
    )  # fmt: skip


def ppo_saver(config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption) -> Saver:
    return Saver(config, world, preemption, lambda: prompt_data(config, prompts), {"sources": source_state(config)})


def _filter(config: TrainConfig, scheduler: OvercommitScheduler, rewards: RewardSum) -> GroupFilter | None:
    clock = verdict_clock(config)
    if config.filter is None or clock is None:
        return None
    metric = config.filter
    labels = tuple(summand.label for summand in rewards.summands if metric in (REWARD, summand.label))

    def total(scores: Scores) -> float:
        return rewards.total(dict(zip(labels, scores, strict=True)))

    def part(scores: Scores) -> float:
        return scores[0]

    return GroupFilter(scheduler, clock, Rule(labels, total if metric == REWARD else part, most_judged(config)))
