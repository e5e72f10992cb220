"""What every rank of a run executes."""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist

from oppo_megatron.config.load import dump_config, load_config
from oppo_megatron.config.run import RewardModelConfig, SFTConfig, TrainConfig
from oppo_megatron.runtime.world import World, open_world
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.setup import build_trainer, read_inputs, write_quarantine
from oppo_megatron.train.trace import merge_traces
from oppo_megatron.train.weights import save_role


def run_rank(kind: str, config_path: str) -> None:
    """Run one rank of a `train`, `sft` or `rm` job.  RANK, WORLD_SIZE and the rest come from the environment."""
    if kind == "train":
        config = load_config(TrainConfig, config_path, [])
        with open_world(config.runtime) as world:
            run_ppo(config, world)
        return
    from oppo_megatron.train.supervised import run_reward_model, run_sft

    if kind == "sft":
        run_sft(load_config(SFTConfig, config_path, []))
    else:
        run_reward_model(load_config(RewardModelConfig, config_path, []))


def run_ppo(config: TrainConfig, world: World) -> None:
    """PPO on this rank, from reading the data to the final weights and the summary."""
    inputs = read_inputs(config)
    _prepare(config, world)
    trainer = build_trainer(config, world, inputs)
    with ExitStack() as stack:
        if trainer.journal is not None:
            write_quarantine(config, inputs)
            stack.enter_context(trainer.journal)
        trainer.run()
    weights = RunDirectory(config.run_dir).weights
    if trainer.actor is not None:
        save_role(trainer.actor.trained.model, weights / "actor", inputs.tokenizer)
    if trainer.scorers is not None:
        save_role(trainer.scorers.critic.model, weights / "critic", inputs.tokenizer)
    dist.barrier()
    if trainer.journal is not None:
        merge_traces(config.run_dir)
        trainer.journal.summarise()


def _prepare(config: TrainConfig, world: World) -> None:
    """The run directory, made by one rank before any other writes into it."""
    if world.rank == 0:
        RunDirectory(config.run_dir).prepare()
        dump_config(config, RunDirectory(config.run_dir).config)
    dist.barrier()
