"""What a peer is to do, as a JSON file: the same models, prompts, response lengths and settings that our runs have.

steps, batch_size, micro_batch     PPO steps; prompts a step; rows of TRL's micro-batch
max_response_tokens, temperature
prompts, lengths                   token ids and forced response tokens of each sequence, in the order of training
eos_id, pad_id                     token ids; the padding token is in no prompt
seed, dtype, device, threads       `dtype`: float32, or bfloat16 as mixed precision
models                             Hugging Face directories by role, float32
ppo, optimizer                     keyword arguments of TRL's PPOConfig
output_dir                         for what the peer itself writes
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.mcore.naming.hf_layout import Head
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import rewrite_weights
from oppo_megatron.records import Prompt
from oppo_megatron.train.inputs import read_inputs

HEADS: dict[str, Head] = {"actor": "lm", "reference": "lm", "critic": "scalar", "reward": "scalar"}


def require_same_work(config: TrainConfig, micro_batch: int | None) -> None:
    """Raises ConfigError with everything in the configuration that TRL's PPOTrainer cannot do."""
    if problems := [*_rollout_problems(config), *_ppo_problems(config), *_batch_problems(config, micro_batch)]:
        raise ConfigError(problems)


def build_work(
    config: TrainConfig, out: Path, *, device: str, dtype: str, threads: int, micro_batch: int | None
) -> dict[str, Any]:
    """The work of a configuration that `require_same_work` accepts.  Writes the models below `out`.

    Raises what reading the configuration's data and weights raises, and ConfigError where the prompts do not suffice.
    """
    inputs, batch = read_inputs(config), config.rollout.batch_size
    assert config.steps is not None, "checked before"
    stream = PromptStream(
        inputs.prompts,
        config.seed,
        epochs=config.epochs,
        limit=config.steps * batch,
        shuffle=config.data.shuffle,
    )
    prompts = list(stream)
    if len(prompts) < config.steps * batch:
        raise ConfigError(
            f"{config.steps} steps of {batch} prompts need {config.steps * batch}, but epochs={config.epochs} "
            f"gives {len(prompts)}; lower --steps, or set epochs=null"
        )
    stopping = Stopping.of(
        config.rollout,
        inputs.tokenizer.eos_ids,
        config.seed,
        inputs.lengths,
        inputs.tokenizer.decode,
        config.debug.lengths,
    )
    vocab_size = open_weights(config.actor, "lm")[0].vocab_size
    return {
        "steps": config.steps,
        "batch_size": batch,
        "micro_batch": micro_batch or batch,
        "max_response_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "prompts": [list(prompt.tokens) for prompt in prompts],
        "lengths": [stopping.limit(prompt.seq_id) for prompt in prompts],
        "eos_id": inputs.tokenizer.eos_id,
        "pad_id": free_token(vocab_size, prompts, inputs.tokenizer.eos_id),
        "seed": config.seed,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "models": export_models(config, out / "models"),
        "ppo": _ppo_settings(config),
        "optimizer": _optimizer_settings(config),
        "output_dir": str(out.resolve() / "trainer"),
    }


def free_token(vocab_size: int, prompts: list[Prompt], eos_id: int) -> int:
    """The largest token id that no prompt holds and that is not EOS: TRL takes every padding token for padding."""
    taken = {token for prompt in prompts for token in prompt.tokens} | {eos_id}
    free = next((token for token in reversed(range(vocab_size)) if token not in taken), None)
    if free is None:
        raise ConfigError(f"the prompts hold all {vocab_size} tokens of the vocabulary, and TRL needs one to pad with")
    return free


def export_models(config: TrainConfig, directory: Path) -> dict[str, str]:
    """The weights that our roles start from, as Hugging Face directories by role."""
    roles, paths = named_roles(config), {}
    for role, head in HEADS.items():
        shape, source = open_weights(roles[role], head)
        rewrite_weights(shape, source, directory / role, head=head, dtype=torch.float32)
        paths[role] = str((directory / role).resolve())
    return paths


def _rollout_problems(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if config.debug.forced_lengths is None:
        yield (
            "debug.forced_lengths is not set: without forced lengths the two do different work; set it, or give --lognormal"
        )
    if rollout.temperature == 0 or rollout.top_k or rollout.top_p < 1:
        yield (
            f"TRL samples the whole vocabulary: rollout.temperature={rollout.temperature:g} must be above 0, "
            f"rollout.top_k={rollout.top_k} must be 0 and rollout.top_p={rollout.top_p:g} must be 1"
        )
    if [(part.kind, part.weight) for part in config.rewards] != [("model", 1.0)]:
        yield "TRL's reward is that of its reward model: `rewards` must be [{kind: model}]"


def _ppo_problems(config: TrainConfig) -> Iterator[str]:
    ppo = config.ppo
    if ppo.kl.mode != "penalty" or ppo.kl.estimator == "k2" or ppo.kl.target is not None:
        yield "TRL's KL is a penalty with a fixed coefficient by k1 or k3: set ppo.kl.mode, .estimator and .target so"
    wanted = {
        "entropy_coefficient": 0.0,
        "reward_clip": None,
        "truncated_score": None,
        "missing_eos_penalty": 0.0,
        "reward_normalization": "none",
        "critic_warmup_steps": 0,
    }
    for name, value in wanted.items():
        if (found := getattr(ppo, name)) != value:
            yield f"ppo.{name} is {found}, and TRL has no such setting: it must be {value}".replace("None", "null")
    if ppo.value_clip == 0:
        yield "ppo.value_clip is 0, but TRL always clips values: set it above 0"
    actor, critic = config.actor.optimizer, config.critic.optimizer
    if actor != critic:
        yield "TRL updates actor and critic with one optimizer: actor.optimizer and critic.optimizer must be the same"
    if actor.decay != "constant" or actor.warmup_steps:
        yield "the learning rates are held equal by a constant one: set optimizer.decay=constant and warmup_steps=0"


def _batch_problems(config: TrainConfig, micro_batch: int | None) -> Iterator[str]:
    batch = config.rollout.batch_size
    if config.steps is None or config.steps < 2:
        yield f"steps is {config.steps}, but the first step is dropped as warm-up: give --steps, at least 2"
    if micro_batch is not None and (batch % micro_batch or config.ppo.minibatches > 1):
        yield (
            f"--trl-micro-batch {micro_batch} must divide rollout.batch_size={batch}, and ppo.minibatches must be 1: TRL "
            "makes an optimizer step of as many micro-batches as a batch has"
        )


def _ppo_settings(config: TrainConfig) -> dict[str, Any]:
    ppo = config.ppo
    return {
        "num_ppo_epochs": ppo.epochs,
        "num_mini_batches": ppo.minibatches,
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
        "cliprange": ppo.clip,
        "cliprange_value": ppo.value_clip,
        "kl_coef": ppo.kl.coefficient,
        "kl_estimator": ppo.kl.estimator,
        "vf_coef": 1.0,  # our critic has an optimizer of its own
        "whiten_rewards": False,
    }


def _optimizer_settings(config: TrainConfig) -> dict[str, float]:
    optimizer = config.actor.optimizer
    return {
        "learning_rate": optimizer.rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
