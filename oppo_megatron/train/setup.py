"""From a checked configuration and what it reads (`inputs`) to this rank's trainer."""

from __future__ import annotations

from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import longest_chunk
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk import ChunkTuner
from oppo_megatron.control.delta import make_delta_controller
from oppo_megatron.control.kl import KLController
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.overcommit.ahead import NEW_RUN, Ahead
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.plan import delta_rule
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.guards.guard import Guard
from oppo_megatron.train.guards.rollback import Rollbacks
from oppo_megatron.train.inputs import Inputs
from oppo_megatron.train.logs.journal import Journal
from oppo_megatron.train.logs.round_trace import RoundTracer
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.memory import MemoryMeter
from oppo_megatron.train.ppo import PPOTrainer
from oppo_megatron.train.role_builder import RoleBuilder
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.topology import build_topology


def build_trainer(
    config: TrainConfig, world: World, inputs: Inputs, saver: Saver, rollbacks: Rollbacks, ahead: Ahead = NEW_RUN
) -> PPOTrainer:
    """Groups, models, optimizers and books of this rank, for what of the run is `ahead`."""
    prompts = prompt_stream(config, inputs.prompts, ahead)
    assert prompts.planned is not None
    total_steps = ahead.total_steps(config.steps, prompts.planned, config.rollout.batch_size)
    with world.activity.doing("process groups", waits=True):
        topology = build_topology(config)
    memory = MemoryMeter.begin(world.device)
    builder = RoleBuilder(config, world, topology, inputs.tokenizer, total_steps, inputs.lengths, memory.memory_limits)
    keeps_journal = world.rank == topology.site.source
    tracer = _tracer(config, world.rank, topology.site)
    trackers = open_trackers(config.logging, config.run_dir) if keeps_journal else None  # may refuse to begin
    actor, critic = builder.actor(), builder.critic()
    return PPOTrainer(
        config=config,
        world=world,
        scheduler=_scheduler(config, prompts),
        rounds=builder.rounds(actor, critic, tracer),
        exchange=ScoreExchange(
            world.rank, world.device, topology.site.placements, inputs.rewards, inputs.tokenizer, world.activity
        ),
        chunk_tuner=ChunkTuner(config.overlap.chunk, longest_chunk(config)),
        kl=KLController(config.ppo.kl),
        spans=tracer.spans,
        tracer=tracer,
        memory=memory,
        actor=actor,
        critic=critic,
        evaluator=_evaluator(config, inputs, builder),
        guard=Guard(config, world.rank, world.device, topology.site, total_steps, rollbacks),
        journal=trackers and Journal(builder.config, total_steps, inputs.tokenizer, world.device, trackers),
        saver=saver,
    )


def _scheduler(config: TrainConfig, prompts: PromptStream) -> OvercommitScheduler:
    overlap, period = config.overlap, config.overlap.admission_period
    buffer = RolloutBuffer(config.rollout.batch_size, 0, overlap.max_deferrals, backfill=period is not None)
    return OvercommitScheduler(prompts, buffer, make_delta_controller(delta_rule(overlap)), period)


def _tracer(config: TrainConfig, rank: int, site: Site) -> RoundTracer:
    schedules = RunDirectory(config.run_dir).schedules
    return RoundTracer(
        SpanRecorder(rank, config.run_dir if config.logging.trace else None),
        CostMeter({role: placement.pp for role, placement in site.placements.items()}),
        site,
        actions=config.debug.actions,
        schedules=schedules if config.debug.actions and rank == site.source else None,
    )


def _evaluator(config: TrainConfig, inputs: Inputs, builder: RoleBuilder) -> Evaluator | None:
    if inputs.heldout is None or inputs.judges is None or config.evaluation is None:
        return None
    slots, budget = builder.num_slots("actor"), builder.kv_budget_bytes
    stopping = builder.heldout_stopping
    judges, tokenizer, runtime = inputs.judges, inputs.tokenizer, config.runtime
    return Evaluator(
        config.evaluation,
        config.early_stop,
        inputs.heldout,
        judges,
        tokenizer,
        stopping,
        runtime,
        config.seed,
        slots,
        budget,
    )


def prompt_stream(config: TrainConfig, prompts: PromptSet, ahead: Ahead = NEW_RUN) -> PromptStream:
    """Exactly the prompts that will be trained: admission ends early enough that none is left over."""
    return PromptStream(
        prompts,
        config.seed,
        epochs=config.passes,
        limit=ahead.limit(config.steps, config.rollout.batch_size),
        shuffle=config.data.shuffle,
        start=ahead.position,
        left_out=ahead.left_out,
    )
