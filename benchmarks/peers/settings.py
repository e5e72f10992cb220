"""Settings that TRL's trainers lack, and the arguments made from a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oppo_megatron.config.algorithm import CHOICES, PRESETS
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError

ALGORITHMS = ("ppo", "grpo")
"""Presets that TRL 1.12 has a trainer for, and that are compared here."""


def require_same_work(config: TrainConfig, micro_batch: int | None) -> None:
    """Raises ConfigError with everything in the configuration that TRL's trainer of the algorithm cannot do."""
    preset = config.algorithm.preset
    if preset not in ALGORITHMS:
        raise ConfigError(f"algorithm.preset is {preset}, which is not compared with TRL; choose from {', '.join(ALGORITHMS)}")
    own = _grpo_problems if preset == "grpo" else _ppo_problems
    if problems := [*_rollout_problems(config), *_update_problems(config), *own(config), *_batch_problems(config, micro_batch)]:
        raise ConfigError(problems)


def algorithm_settings(config: TrainConfig) -> dict[str, Any]:
    """The parts of the work that the algorithm and the optimizer decide."""
    optimizer = {"optimizer": _optimizer_settings(config)}
    if config.algorithm.preset == "grpo":
        return {**optimizer, "grpo": _grpo_settings(config), "length_penalty": _length_penalty(config)}
    return {**optimizer, "ppo": _ppo_settings(config)}


def _rollout_problems(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if config.rollout.forced_lengths is None:
        yield ("rollout.forced_lengths is not set: without forced lengths the two do different work; set it, or give --lognormal")
    if rollout.temperature == 0 or rollout.top_k or rollout.top_p < 1:
        yield (
            f"TRL samples the whole vocabulary: rollout.temperature={rollout.temperature:g} must be above 0, "
            f"rollout.top_k={rollout.top_k} must be 0 and rollout.top_p={rollout.top_p:g} must be 1"
        )


def _update_problems(config: TrainConfig) -> Iterator[str]:
    """Settings that neither trainer has."""
    ppo = config.ppo
    wanted = {
        "entropy_coefficient": 0.0,
        "reward_clip": None,
        "truncated": None,
        "reward_normalization": "none",
        "critic_warmup_steps": 0,
    }
    for name, value in wanted.items():
        if (found := getattr(ppo, name)) != value:
            yield f"ppo.{name} is {found}, and TRL has no such setting: it must be {value}".replace("None", "null")
    optimizer = config.actor.optimizer
    if optimizer.decay != "constant" or optimizer.warmup_steps:
        yield "the learning rates are held equal by a constant one: set optimizer.decay=constant and warmup_steps=0"


def _ppo_problems(config: TrainConfig) -> Iterator[str]:
    ppo, critic = config.ppo, config.critic
    assert critic is not None, "the algorithm is ppo"
    if [(part.kind, part.weight) for part in config.rewards] != [("model", 1.0)]:
        yield "TRL's reward is its reward model's score: `rewards` must be [{kind: model}]"
    if ppo.kl.mode != "penalty" or ppo.kl.estimator == "k2" or ppo.kl.target is not None:
        yield "TRL's KL is a penalty with a fixed coefficient by k1 or k3: set ppo.kl.mode, .estimator and .target so"
    if ppo.value_clip == 0:
        yield "ppo.value_clip is 0, but TRL always clips values: set it above 0"
    if config.actor.optimizer != critic.optimizer:
        yield "TRL updates actor and critic with one optimizer: actor.optimizer and critic.optimizer must be the same"


def _grpo_problems(config: TrainConfig) -> Iterator[str]:
    ppo, kl = config.ppo, config.ppo.kl
    for name in CHOICES:
        if (found := getattr(config.algorithm, name)) != (value := PRESETS["grpo"].choices[name]):
            yield f"algorithm.{name} is {found}, but TRL is compared as GRPO was published: it must be {value}"
    if kl.mode != "none" and ((kl.mode, kl.formula) != ("loss", "k3") or kl.target is not None):
        yield "TRL's KL is a term of the loss with a fixed coefficient by k3: set ppo.kl.mode, .estimator and .target so"
    if ppo.epochs > 1 or ppo.minibatches > 1:
        yield (
            f"ppo.epochs is {ppo.epochs} and ppo.minibatches {ppo.minibatches}, but TRL computes old log-probs in a forward of "
            "their own if a batch has several optimizer steps; set both to 1"
        )
    if ppo.dual_clip is not None or config.filter is not None:
        yield "TRL is compared without ppo.dual_clip and filter: remove them"
    if len(config.rewards) != 1 or config.rewards[0].name != "length" or config.rewards[0].weight != 1:
        yield (
            "the reward has to be one that both have, and that costs neither time: `rewards` must be [{kind: verifier, "
            "name: length, buffer_tokens: N}]"
        )


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


def _grpo_settings(config: TrainConfig) -> dict[str, Any]:
    ppo, none = config.ppo, config.ppo.kl.mode == "none"
    return {
        "loss_type": "grpo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "beta": 0.0 if none else ppo.kl.coefficient,
        "use_bias_correction_kl": ppo.kl.corrected,
        "epsilon": ppo.clip,
        "epsilon_high": ppo.clip if ppo.clip_high is None else ppo.clip_high,
        "max_grad_norm": config.actor.optimizer.clip_grad,
    }


def _length_penalty(config: TrainConfig) -> dict[str, int | None]:
    """The same function of the response's length as our rule `length`."""
    (part,) = config.rewards
    longest = part.max_tokens or config.rollout.max_response_tokens
    return {"max_completion_len": longest, "soft_punish_cache": part.buffer_tokens}


def _optimizer_settings(config: TrainConfig) -> dict[str, float]:
    optimizer = config.actor.optimizer
    return {
        "learning_rate": optimizer.rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }
