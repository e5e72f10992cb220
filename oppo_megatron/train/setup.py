"""Builds this rank's models, caches, workers and trainer from checked configuration and inputs (`inputs.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.packed import GapLimit
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
from oppo_megatron.control.delta_controllers import KLController, make_delta_controller
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.engine.device_decode import SYNC_STEPS
from oppo_megatron.engine.executor import ROUNDS_IN_FLIGHT, ROUNDS_OF_AN_UPDATE, Executor, RoleWorker
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScorerRole, ScoringWorker
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import ChunkOutlet, ListenWorker, of_first_rank
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.placements import named_roles, shares_weights
from oppo_megatron.mcore.kv.paged import find_kernel
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import DTYPES, RoleModel
from oppo_megatron.mcore.roles import as_it_began, load_role
from oppo_megatron.overcommit.ahead import NEW_RUN, Ahead
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import GroupFilter, OvercommitScheduler, Rule, Scores
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.links import most_streams, transport_of
from oppo_megatron.schedule.plan import cache_slots, delta_rule, new_planner, plan_step, round_generator
from oppo_megatron.schedule.weaving.costs import CostMeter
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.continuous import ContinuousLoop
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
    world: World
    topology: Topology

    def rounds(self, inputs: Inputs, roles: Mapping[str, TrainedRole], tracer: RoundTracer) -> RoundRunner:
        config, site, stopping = self.config, self.topology.site, self.stopping(inputs)
        rank, device = self.world.rank, self.world.device
        decode = listen = None
        if site.placements["actor"].coords(rank) is None:
            listen = ListenWorker(device)
        else:
            serving = roles["actor"].serving
            decode = DecodeWorker(
                serving,
                self._cache("actor", serving),
                sampling=Sampling.of(config.rollout, config.seed, members(config)),
                stopping=stopping,
                outlet=ChunkOutlet(device) if rank in site.feeds else None,
                sync_steps=SYNC_STEPS[device.type],
                keep_routes=config.rollout.router_replay,
            )
        scoring = self._scoring_workers(roles)
        planner = new_planner(
            config,
            site,
            round_generator(config.overlap, site),
            stopping.limit,
            rank=None if config.logging.trace == "actions" else rank,  # schedules.txt shows all ranks
            transport=transport_of(device.type, os.environ, most_streams(site)),
        )
        first: RoleWorker = listen if decode is None else decode  # type: ignore[assignment]
        workers = {"actor": first, **scoring}
        executor = Executor(
            rank, workers, self.topology.links, config.runtime.timeout_s, device, tracer, self.world.activity,
            tracer.spans.clock, ROUNDS_OF_AN_UPDATE if site.followers else ROUNDS_IN_FLIGHT,
        )  # fmt: skip
        places = {name: placement.coords(rank) for name, placement in site.placements.items()}
        coords_by_role = {name: coords.replica for name, coords in places.items() if coords is not None}
        return RoundRunner(planner, executor, coords_by_role, decode, listen, scoring, tracer.planned)

    def stopping(self, inputs: Inputs) -> Stopping:
        rollout, tokenizer = self.config.rollout, inputs.tokenizer
        return Stopping.of(rollout, tokenizer.eos_ids, self.config.seed, inputs.lengths, tokenizer.decode, rollout.lengths)

    def _scoring_workers(self, roles: Mapping[str, TrainedRole]) -> dict[str, ScoringWorker]:
        config, workers = self.config, dict[str, ScoringWorker]()
        for name, head in SCORERS.items():
            groups = self.topology.groups.get(name)
            if groups is None:
                continue
            if name == "critic":
                model = roles["critic"].serving
            elif name == "reference" and shares_weights(config):
                model = as_it_began(roles["actor"].serving, groups, named_roles(config)[name])
            else:
                model = load_role(named_roles(config)[name], groups, head=head, role=name, **self._model_options).requires_grad_(
                    False
                )
            temperature = config.algorithm.temperature(config.rollout.temperature)
            workers[name] = ScoringWorker(name, model, self._cache(name, model), temperature=temperature)
        return workers

    def trained_roles(self, total_steps: int) -> dict[str, TrainedRole]:
        """Build the actor and the critic on the ranks that have one of their models."""
        heads: dict[str, Head] = {"actor": "lm", "critic": "scalar"}
        built = {name: self.trained(name, heads[name], total_steps) for name in self.config.trained}
        return {name: role for name, role in built.items() if role is not None}

    def learners(self, roles: Mapping[str, TrainedRole], algorithm: Algorithm) -> tuple[Actor | None, Critic | None]:
        config, actor = self.config, roles.get("actor")
        critic = Critic(roles["critic"], algorithm, config.runtime.micro_batch_tokens) if "critic" in roles else None
        if actor is None or actor.own_trained is None:
            return None, critic
        temperature = config.rollout.temperature
        limit = GapLimit.of(config.guards, config.actor.dtype, temperature)
        return Actor(actor, algorithm, temperature, gap_limit=limit), critic

    def trained(self, name: str, head: Head, total_steps: int) -> TrainedRole | None:
        """Build a trained role; None on ranks without it.  `total_steps`: of the whole run, for the learning rate."""
        groups, training = self.topology.groups.get(name), self.topology.training.get(name)
        if groups is None and training is None:
            return None
        options = self._model_options | {"head": head, "role": name, "across": self.topology.across if name == "actor" else None}
        updates = num_updates(self.config, name, total_steps)
        role = build_trained_role(self.config.trained[name], groups, training, num_updates=updates, **options)
        for chunk in () if role.own_trained is None else role.trained.chunks:
            chunk.register_forward_pre_hook(lambda *_: self.world.activity.beat())  # every micro-batch is a sign of life
        return role

    @property
    def _model_options(self) -> dict[str, Any]:
        return {"max_length": max_context(self.config), "device": self.world.device}

    def _cache(self, name: str, model: RoleModel) -> SequenceCache:
        placement, runtime = self.topology.site.placements[name], self.config.runtime
        cache = model.new_cache(share_of_sequences(self.config, name, placement.dp), runtime.kv_budget_bytes, runtime.kv_layout)
        planned = cache_slots(self.config, name, placement)
        assert cache.num_slots == planned, (name, cache.num_slots, planned)
        return cache


def build_loop(
    config: TrainConfig, world: World, inputs: Inputs, saver: Saver, rollbacks: Rollbacks, ahead: Ahead = NEW_RUN
) -> TrainingLoop:
    """Build groups, models, optimizers and books for the rest of the run (`ahead`)."""
    config = _with_kv_layout(config, world.device)
    prompts = prompt_stream(config, inputs.prompts, ahead)
    total_steps = ahead.total_steps(config.steps, prompts.planned, batch_rows(config))
    with world.activity.doing("process groups", waits=True):
        topology = build_topology(config, world.device)
    algorithm, memory = Algorithm.of(config), MemoryMeter.begin(world.device)
    builder, site = RoleBuilder(config, world, topology), topology.site
    keeps_journal = world.rank == site.source
    costs = CostMeter({role: placement.pp for role, placement in site.placements.items()})
    all_actions, run = config.logging.trace == "actions", RunDirectory(config.run_dir)
    spans = SpanRecorder(world.rank, run if config.logging.trace else None)
    tracer = RoundTracer(
        spans, costs, site, actions=all_actions, schedules=run.schedules if all_actions and keeps_journal else None
    )
    trackers = open_trackers(config.logging, config.run_dir) if keeps_journal else None  # before models: may refuse to start
    journal = trackers and Journal(config, total_steps, inputs.tokenizer, world.device, trackers)
    roles = builder.trained_roles(total_steps)
    actor, critic = builder.learners(roles, algorithm)
    rounds = builder.rounds(inputs, roles, tracer)
    where: Literal["shared", "waited", "apart"] | None = None
    if config.critic is not None:
        where = "waited" if plan_step(config).wait_for_critic else "apart"
        if topology.valuing or not set(site.placements["critic"].ranks).isdisjoint(site.placements["actor"].ranks):
            where = "shared"
    span = "actor" if rounds.decode is not None else "scorer" if rounds.scoring else "trainer"
    meter = StepMeter(world, rounds, tracer.spans, tracer, memory, journal, span, where)
    apart = topology.across is not None
    guard = Guard(config, algorithm, world.rank, world.device, site, total_steps, rollbacks, apart)
    overlap, period = config.overlap, config.overlap.admission_period
    buffer = RolloutBuffer(
        batch_rows(config), 0, overlap.max_staleness, backfill=period is not None, group_size=members(config).size,
        filtered=config.filter is not None, queue_size=None if overlap.continuous is None else overlap.continuous.queue_size,
    )  # fmt: skip
    to_train = None if config.filter is None else ahead.to_train(config.steps, batch_rows(config))
    controller = make_delta_controller(delta_rule(overlap), partial(of_first_rank, device=world.device))
    scheduler = OvercommitScheduler(prompts, buffer, controller, period, to_train)
    kl = KLController(config.ppo.kl)
    exchange = ScoreExchange(
        world.rank, world.device, site.placements, inputs.rewards, inputs.tokenizer, world.activity,
        members(config), critic, topology.valuing, topology.relay, StepRewards.of(config.rewards, inputs.tokenizer),
    )  # fmt: skip
    adaptation = Adaptation(
        world, scheduler, ChunkTuner(config.overlap.chunk_sizes, longest_chunk(config)), kl, rounds.planner, tracer.meter,
        members(config),
    )  # fmt: skip
    trainer = topology.training_placements["actor"].output_rank() if apart else None
    updates = Updates(
        config, world, actor, critic, roles, guard, kl, exchange, meter, saver.conclude, lambda: scheduler.position, trainer
    )
    groups = _filter(config, scheduler, inputs.rewards)
    rollouts = Rollouts(scheduler, rounds, exchange, overlap, lambda: meter.facts.planning(), builder.stopping(inputs), groups)
    evaluator = None
    if inputs.heldout is not None and inputs.judges is not None:
        evaluator = Evaluator(config, inputs.heldout, inputs.judges, rounds, exchange, world)
    loop = TrainingLoop if overlap.continuous is None else ContinuousLoop
    return loop(config, world, inputs.prompts, rollouts, exchange, updates, adaptation, evaluator, saver, meter)


def _with_kv_layout(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Resolve `kv_layout: auto` once, so that planner and caches count slots the same way."""
    if config.runtime.kv_layout != "auto":
        return config
    dtypes = {DTYPES[role.dtype] for role in named_roles(config).values()}
    layout: KVLayout = "dense" if any(find_kernel(device, dtype) is None for dtype in dtypes) else "paged"
    return config.model_copy(update={"runtime": config.runtime.with_kv_layout(layout)})


def prompt_stream(config: TrainConfig, prompts: PromptSet, ahead: Ahead = NEW_RUN) -> PromptStream:
    """Return a stream of exactly the prompts to train; with a filter their number is unknown, so the scheduler ends admission."""
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
