"""What every rank of a run executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.liveness.stacks import stacks_on_request
from oppo_megatron.cluster.liveness.watching import watched
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_REQUEUE, EXIT_ROLLBACK, CapacityError
from oppo_megatron.mcore.out_of_memory import is_out_of_memory
from oppo_megatron.overcommit.ahead import NEW_RUN
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.space import clear_when_full
from oppo_megatron.rundir.trace import merge_traces
from oppo_megatron.schedule.weaving.costs_file import costs_tree
from oppo_megatron.train.guards.rollback import RollBack, Rollbacks
from oppo_megatron.train.hosts import share_run_directory
from oppo_megatron.train.inputs import Inputs, describe_inputs, read_inputs
from oppo_megatron.train.memory import require_memory
from oppo_megatron.train.ppo import PPOTrainer
from oppo_megatron.train.saving.finding import Found, find_checkpoint
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.saving.snapshot import trained_models
from oppo_megatron.train.saving.telling import tell_of_nothing
from oppo_megatron.train.setup import build_trainer
from oppo_megatron.train.supervised import run_reward_model, run_sft
from oppo_megatron.train.weights import save_role


def run_rank(kind: str, config: Any) -> int:
    """Run one rank of a `train`, `sft` or `rm` job; returns its exit code.

    RANK, WORLD_SIZE and the rest come from the environment.
    """
    choose_device(config.runtime)
    stacks_on_request()
    with _told_of_memory(), clear_when_full(config.run_dir):
        if kind == "train":
            return _run_train(config)
        return 0 if (run_sft if kind == "sft" else run_reward_model)(config) else EXIT_REQUEUE


def _run_train(config: TrainConfig) -> int:
    inputs, preemption = read_inputs(config), Preemption(config.preempt_deadline_s)
    try:
        with (
            open_world(config.runtime) as world,
            RunDirectory(config.run_dir).held() if world.rank == 0 else nullcontext(),
            watched(world, config.stall_deadline_s, config.run_dir, "train"),
            preemption.listening(),
        ):
            require_memory(config, world)
            return 0 if run_ppo(config, world, inputs, preemption) else EXIT_REQUEUE
    except RollBack:
        return EXIT_ROLLBACK


@contextmanager
def _told_of_memory() -> Iterator[None]:
    """Memory that runs out where less at once would be of no help: CapacityError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise CapacityError(
            f"memory ran out outside of decoding, prefill and training micro-batches ({told}): compare "
            "`--dry-run` with what this machine has; use more ranks, or lower rollout.batch_size or runtime.kv_cache_mb"
        ) from error


def run_ppo(config: TrainConfig, world: World, inputs: Inputs, preemption: Preemption) -> bool:
    """PPO on this rank, up to the final weights and the summary; False where it was told to stop before, and saved.

    Raises RollBack where the run is to be started again from its last checkpoint.
    """
    found = find_checkpoint(config, world)
    saver = Saver(config, world, inputs.prompts, preemption)
    rollbacks = Rollbacks.of_run(
        RunDirectory(config.run_dir), inputs.prompts, config.seed, config.data.shuffle, resumed=found is not None
    )
    ahead, start = NEW_RUN, [tell_of_nothing(config.run_dir)] if config.checkpoint.resume else []
    if found is not None:  # before anything of the run is cut off, or its settings written anew
        ahead, start = saver.require_same_run(found, rollbacks.left_out), saver.describe(found)
    _prepare(config, world, found)
    with world.activity.doing("building models and caches"):
        trainer = build_trainer(config, world, inputs, saver, rollbacks, ahead)
    with ExitStack() as stack:
        stack.callback(inputs.rewards.close)
        if inputs.judges is not None:
            stack.callback(inputs.judges.close)
        if trainer.journal is not None:
            if inputs.quarantine:
                inputs.quarantine.write(RunDirectory(config.run_dir).quarantine)
            stack.enter_context(trainer.journal)
            notes = [*start, *describe_inputs(inputs), *(rollback.describe() for rollback in rollbacks.done)]
            trainer.journal.progress.note("\n".join(notes))
        if found is not None:
            saver.restore(trainer, found)
        if not trainer.run():
            return False
        with world.activity.doing("writing weights"):
            _save_weights(config, trainer, inputs, RunDirectory(config.run_dir).weights)
        saver.save_end(trainer)
        with world.activity.doing("writing the best step's weights"):
            if config.save_weights and saver.load_best(trained_models(trainer), Position(trainer.done)):
                _save_weights(config, trainer, inputs, RunDirectory(config.run_dir).best)
    with world.activity.doing("summary"):
        _finish(config, trainer, inputs)
    return True


def _save_weights(config: TrainConfig, trainer: PPOTrainer, inputs: Inputs, folder: Path) -> None:
    if config.save_weights and trainer.actor is not None:
        stops = config.rollout.stop_token_ids
        save_role(trainer.actor.role.trained.chunks, folder / "actor", inputs.tokenizer, config.actor.checkpoint, stops)
    if config.save_weights and trainer.critic is not None:
        save_role(trainer.critic.role.trained.chunks, folder / "critic", inputs.tokenizer, config.critic.checkpoint)


def _finish(config: TrainConfig, trainer: PPOTrainer, inputs: Inputs) -> None:
    run = RunDirectory(config.run_dir)
    trainer.memory.look()
    memory = trainer.memory.of_all_ranks()
    dist.barrier()
    if trainer.journal is not None:
        merge_traces(config.run_dir)
        planner = trainer.rounds.planner
        if planner.generator == "woven":
            write_json(run.costs, costs_tree(planner.costs))
        trainer.journal.summarise(inputs.counts(), memory, trainer.guard.rollbacks.summary(), trainer.saver.best)


def _prepare(config: TrainConfig, world: World, found: Found | None) -> None:
    """The run directory, made by one rank before any other writes into it."""
    run = RunDirectory(config.run_dir)
    if world.rank == 0:
        if found is None:
            run.prepare()
        else:
            run.reopen(found.state["done"], found.state["saved_at"])
        dump_config(config, run.config)
    share_run_directory(run, world, owner=world.rank == 0, show=config.logging.console != "off")
