"""Builds this rank's trainer from a checked configuration and its inputs (`inputs.py`)."""

from __future__ import annotations

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import batch_rows, longest_chunk, members, most_judged
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.overcommit.ahead import NEW_RUN, Ahead
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.filter import GroupFilter, Rule, Scores
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.plan import delta_rule, plan_step
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.guard import Guard, Rollbacks
from oppo_megatron.train.inputs import Inputs, verdict_clock
from oppo_megatron.train.logs.journal import Journal
from oppo_megatron.train.logs.meter import RoundTracer, StepMeter
from oppo_megatron.train.logs.step import CriticPlacement
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.memory_meter import MemoryMeter
from oppo_megatron.train.role_builder import RoleBuilder
from oppo_megatron.train.roles import build_topology
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.saving.state import prompt_data, source_state
from oppo_megatron.train.score_exchange import ScoreExchange, StepRewards
from oppo_megatron.train.updates import Adaptation, Updates


def build_loop(
    config: TrainConfig, world: World, inputs: Inputs, saver: Saver, rollbacks: Rollbacks, ahead: Ahead = NEW_RUN
) -> TrainingLoop:
    """Build groups, models, optimizers and books of this rank, for the part of the run that is `ahead`."""
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
    placement = None
    if config.critic is not None:
        shares_ranks = not set(site.placements["critic"].ranks).isdisjoint(site.placements["actor"].ranks)
        placement = CriticPlacement(shares_ranks, plan_step(config).wait_for_critic)
    role = "scorer" if actor is None else "actor"
    meter = StepMeter(world, rounds, tracer.spans, tracer, memory, journal, role, placement)
    guard = Guard(config, algorithm, world.rank, world.device, site, total_steps, rollbacks)
    scheduler, kl = _scheduler(config, prompts, ahead), KLController(config.ppo.kl)
    exchange = ScoreExchange(
        world.rank, world.device, site.placements, inputs.rewards, inputs.tokenizer, world.activity,
        members(config), actor, critic, StepRewards.of(config.rewards, inputs.tokenizer),
    )  # fmt: skip
    adaptation = Adaptation(
        world, scheduler, ChunkTuner(config.overlap.chunk, longest_chunk(config)), kl, rounds.planner, tracer.meter,
        tunes_chunk=config.overlap.intra, members=members(config),
    )  # fmt: skip
    updates = Updates(
        config, world, actor, critic, guard, kl, exchange, meter, saver.conclude, lambda: scheduler.position
    )
    groups = _filter(config, scheduler, inputs.rewards)
    rollouts = Rollouts(scheduler, rounds, exchange, config.overlap, meter.planning, groups)
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
    """Return the stream of exactly the prompts that will be trained: admission ends early enough that none is left over.

    With a filter their number is not known: the scheduler stops admission at the same point.
    """
    limit = None if config.filter is not None else ahead.limit(config.steps, batch_rows(config))
    return PromptStream(
        prompts, config.seed, epochs=config.passes, limit=limit, shuffle=config.data.shuffle,
        start=ahead.position, left_out=ahead.left_out,
    )  # fmt: skip


def ppo_saver(config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption) -> Saver:
    extra = {"caches": config.checkpoint.caches, "sources": source_state(config)}
    return Saver(config, world, preemption, lambda: prompt_data(config, prompts), extra)


def _filter(config: TrainConfig, scheduler: OvercommitScheduler, rewards: RewardSum) -> GroupFilter | None:
    clock = verdict_clock(config)
    if config.filter is None or clock is None:
        return None
    metric = config.filter.metric
    labels = tuple(summand.label for summand in rewards.summands if metric in (REWARD, summand.label))

    def total(scores: Scores) -> float:
        return rewards.total(dict(zip(labels, scores, strict=True)))

    def part(scores: Scores) -> float:
        return scores[0]

    return GroupFilter(scheduler, clock, Rule(labels, total if metric == REWARD else part, most_judged(config)))
