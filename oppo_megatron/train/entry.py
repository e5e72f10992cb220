"""The entry point of every rank of a run."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.clock import by_time, to_stderr
from oppo_megatron.cluster.liveness.watchdog import stacks_on_request, watched
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.config.derived import describe_batch
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_AGAIN, EXIT_REQUEUE
from oppo_megatron.layout.placements import named_roles, round_placements, scorers_leader
from oppo_megatron.mcore.cpu import require_private_ops
from oppo_megatron.mcore.device import memory_for
from oppo_megatron.overcommit.ahead import NEW_RUN
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.disk import clear_when_full
from oppo_megatron.rundir.trace import merge_traces
from oppo_megatron.schedule.weaving.costs import costs_tree
from oppo_megatron.train.guard import RollBack, Rollbacks
from oppo_megatron.train.inputs import Inputs, describe_inputs, read_inputs, refused_before, without_refused
from oppo_megatron.train.memory_meter import require_memory
from oppo_megatron.train.run_files import prepare_run_directory, save_role
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.state import Found, describe_missing, find_checkpoint, rest_of_run
from oppo_megatron.train.setup import build_loop, ppo_saver
from oppo_megatron.train.supervised import task_of, train_supervised


def run_rank(kind: str, config: Any) -> int:
    choose_device(config.runtime)
    stacks_on_request()
    other_work = (
        "work outside of decoding, prefill and training micro-batches",
        "compare `--dry-run` with this machine's memory; use more ranks, or lower rollout.batch_size or runtime.kv_cache_mb",
    )
    with memory_for(lambda: other_work), clear_when_full(config.run_dir):
        try:
            return 0 if run_training(kind, config) else EXIT_REQUEUE
        except RollBack:
            return EXIT_AGAIN


def run_training(kind: str, config: Any) -> bool:
    """Train as command `kind`; False if asked to stop, after saving."""
    preemption, inputs = Preemption(config.preempt_deadline_s), None
    if kind == "train":
        inputs = read_inputs(config, by_time(is_owner=os.environ.get("RANK", "0") == "0"))
    models = config.models if inputs is None else named_roles(config)
    with (
        open_world(config.runtime) as world,
        RunDirectory(config.run_dir).held() if inputs is not None and world.rank == 0 else nullcontext(),
        watched(world, config.stall_deadline_s, config.run_dir, kind),
        preemption.listening(),
    ):
        require_memory(config, world)
        if world.device.type == "cpu":
            require_private_ops({model.dtype for model in models.values()})
        if inputs is None:
            return train_supervised(config, task_of(config), world, preemption)
        return run_ppo(config, world, inputs, preemption)


def run_ppo(config: TrainConfig, world: World, inputs: Inputs, preemption: Preemption) -> bool:
    """Run PPO on this rank; False if asked to stop, after saving.  Raises RollBack to restart from the last checkpoint."""
    with closing(inputs):
        found = find_checkpoint(config, world)
        return _train(config, world, _without_refused(config, world, inputs, resumed=found is not None), preemption, found)


def _without_refused(config: TrainConfig, world: World, inputs: Inputs, *, resumed: bool) -> Inputs:
    """Set aside rows whose expected answers cannot be compared.  Collective: the rank that will score responses tries them."""
    placements, before, refused = round_placements(config), RunDirectory(config.run_dir).quarantine, list[Any]()

    def tell(line: str) -> None:
        world.activity.beat()
        to_stderr(line)

    for rewards, prompts, name in inputs.judged():
        source = scorers_leader(placements) if name == "data" else placements["actor"].output_rank()
        found: list[Any] = [None]
        with waiting_for(f"expected answers of {name}", world.activity, waits=world.rank != source):
            if world.rank == source:
                fields = [row.fields for row in prompts.rows]
                found = [refused_before(prompts, before) if resumed else rewards.unusable(fields, tell, every=False)]
            dist.broadcast_object_list(found, src=source)
        refused += found
    return without_refused(inputs, config, refused)


def _train(config: TrainConfig, world: World, inputs: Inputs, preemption: Preemption, found: Found | None) -> bool:
    saver, run = ppo_saver(config, world, inputs.prompts, preemption), RunDirectory(config.run_dir)
    rollbacks = Rollbacks.of_run(run, inputs.prompts, config.seed, config.data.shuffle, resumed=found is not None)
    ahead, start = NEW_RUN, [describe_missing(config.run_dir)] if config.resume else []
    if found is not None:  # before the run's files are cut or its settings overwritten
        ahead = rest_of_run(found, saver.data, config, inputs.prompts, rollbacks.left_out)
        start = saver.describe(found)
    state = None if found is None else found.state
    prepare_run_directory(config, world, state, inputs.quarantine, owner=world.rank == 0)
    with world.activity.doing("building models and caches"):
        loop = build_loop(config, world, inputs, saver, rollbacks, ahead)
    with ExitStack() as stack:
        if loop.journal is not None:
            stack.enter_context(loop.journal)
            back = (each.describe() for each in rollbacks.done)
            loop.journal.note("\n".join([*start, describe_batch(config), *describe_inputs(inputs), *back]))
        if found is not None:
            loop.restore(found)
        if not loop.run():
            return False

        def save_weights(folder: Path) -> None:
            if loop.actor is not None:
                stops = config.rollout.stop_token_ids
                save_role(loop.actor.role.trained.chunks, folder / "actor", inputs.tokenizer, config.actor.checkpoint, stops)
            if loop.critic is not None and config.critic is not None:
                save_role(loop.critic.role.trained.chunks, folder / "critic", inputs.tokenizer, config.critic.checkpoint)

        saver.finish(loop, save_weights)
    with world.activity.doing("summary"):
        loop.meter.memory.look()
        memory, costs = loop.meter.memory.of_all_ranks(), loop.adaptation.measured_costs()
        dist.barrier()
        if loop.journal is not None:
            merge_traces(config.run_dir)
            if costs is not None:
                write_json(run.costs, costs_tree(costs))
            loop.journal.write_summary(inputs.counts(), memory, loop.rollbacks.summary(), saver.best)
    return True
