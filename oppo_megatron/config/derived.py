"""Numbers that follow from several settings together."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.evaluation import REWARD, Standard
from oppo_megatron.config.model import LoraConfig, RoleConfig
from oppo_megatron.config.rewards import part_labels
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.records import Members


def adapters(config: TrainConfig | SupervisedConfig) -> dict[str, LoraConfig]:
    if isinstance(config, SupervisedConfig):
        trained = {"model": config.model.lora}
    else:
        trained = {name: role.lora for name, role in config.trained.items()}
    return {name: lora for name, lora in trained.items() if lora is not None}


def max_context(config: TrainConfig) -> int:
    """Tokens of the longest sequence, held-out prompts included."""
    data = [config.data] + ([config.evaluation.data] if config.evaluation else [])
    return max(each.max_prompt_tokens for each in data) + config.rollout.max_response_tokens


def least_micro_batch(config: TrainConfig) -> int:
    """Least `runtime.micro_batch_tokens`: the longest trained sequence, or pair."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return 2 * longest if config.algorithm.pairs else longest


def usual_prompt_tokens(config: TrainSettings) -> int:
    """Prompt tokens of a predicted run: half of the most."""
    return max(1, config.data.max_prompt_tokens // 2)


def rows_per_prompt(config: TrainSettings) -> int:
    """Neighbouring rows of a batch whose prompt an update reads once; 1: each row reads its own."""
    divided = any(role is not None and role.train.cp > 1 for role in (config.actor, config.critic))  # by context parallelism
    return 1 if divided or "fork" in config.overlap.without else config.rollout.group_size


def row_tokens(config: TrainSettings, prompt_tokens: float, response_tokens: float) -> float:
    """Mean tokens of a row of an update, if as many rows share a prompt as fit into a micro-batch."""
    fitting = (config.runtime.micro_batch_tokens - prompt_tokens) // max(1, response_tokens)
    return prompt_tokens / max(1, min(rows_per_prompt(config), fitting)) + response_tokens


READ_GREEDY = ("actor", "reward")
"""Roles that read greedy responses, which are a baseline only."""


def members(config: TrainSettings) -> Members:
    return Members(config.rollout.group_size, config.algorithm.greedy)


def batch_rows(config: TrainSettings) -> int:
    """Sequences of a batch, greedy ones included."""
    return config.rollout.batch_size // config.rollout.group_size * members(config).size


def most_sequences(config: TrainConfig) -> int:
    """Sequences decoded and scored at once: the batch and the largest delta, greedy ones included.  Backfill adds none."""
    delta = config.overlap.delta
    return batch_rows(config) + (max(delta.max, delta.initial) * members(config).size if config.overlap.inter else 0)


def share_of_sequences(config: TrainConfig, role: str, dp: int) -> int:
    """Most sequences, in whole groups, of one of `dp` replicas."""
    each = members(config)
    of_group = each.size if role in READ_GREEDY else each.trained
    return ceil(most_sequences(config) // each.size / dp) * of_group


def describe_batch(config: TrainSettings) -> str:
    rollout, ppo = config.rollout, config.ppo
    groups = rollout.batch_size // rollout.group_size
    prompts = f"{groups} groups of {rollout.group_size}" if rollout.group_size > 1 else f"{groups} prompts"
    greedy = f", and {groups} greedy ones that are not trained" if config.algorithm.greedy else ""
    updates = ppo.epochs * ppo.minibatches
    unfiltered = PRESETS[config.algorithm.preset].filter is not None and config.filter is None
    return (
        f"algorithm {config.algorithm.preset}: a batch is {rollout.batch_size} responses to {prompts}{greedy}; "
        f"{updates} optimizer step{'s' * (updates > 1)} (epochs {ppo.epochs} x minibatches {ppo.minibatches}) "
        f"of {minibatch_rows(config)} responses"
        + f", at most {minibatch_parts(config)} pairs" * config.algorithm.pairs
        + "; groups of equal reward are trained, too (no filter without overlap.inter and overlap.backfill)" * unfiltered
    )


def longest_chunk(config: TrainConfig) -> int:
    """Most decode steps of a round: at most a response's tokens, and none beyond an admission."""
    longest, period = config.rollout.max_response_tokens, config.overlap.admission_period
    return longest if period is None else min(longest, period)


def minibatch_rows(config: TrainSettings) -> int:
    return max(1, config.rollout.batch_size // config.ppo.minibatches)


def minibatch_parts(config: TrainSettings) -> int:
    """Parts of an optimizer step: its rollouts, or its pairs, one per group."""
    rows = minibatch_rows(config)
    return max(1, rows // config.rollout.group_size) if config.algorithm.pairs else rows


def num_updates(config: TrainConfig, role: str, steps: int) -> int:
    """Optimizer steps of a role; the actor makes none during the critic's warm-up."""
    warming = config.ppo.critic_warmup_steps if role == "actor" else 0
    return max(0, steps - warming) * config.ppo.epochs * config.ppo.minibatches


def scorers(config: TrainConfig) -> Iterator[tuple[str, RoleConfig]]:
    """Yield scorer roles with a configuration (a null reference is the actor's start)."""
    for name in ("reference", "reward", "critic"):
        role: RoleConfig | None = getattr(config, name)
        if role is not None:
            yield name, role


def best_standard(config: TrainSettings | SupervisedConfig) -> Standard | None:
    """The best step's metric: `checkpoint.keep_best`, else `early_stop`'s, the first held-out one, the reward."""
    rules, names = config.checkpoint, config.measured
    if isinstance(rules.keep_best, str):
        return Standard.of(rules.keep_best)
    if config.early_stop is not None:
        return config.early_stop.standard
    metric = names[0] if names else config.ALWAYS_MEASURED
    return None if metric is None else Standard.of(metric)


BATCHES_JUDGED = 10
"""Groups that a step with a filter may judge before it has a batch, in batches."""


def most_judged(config: TrainConfig) -> int:
    return BATCHES_JUDGED * (config.rollout.batch_size // config.rollout.group_size)


def verdict_lag(config: TrainConfig, metric: str) -> int:
    """Verdict-clock periods between the end of a response and its filter by `metric`.

    A reward model reads the last chunk a period later, also without streaming, so that streaming changes no batch.
    """
    parts = zip(config.rewards, part_labels(config.rewards), strict=True)
    return int(any(part.reads_model for part, label in parts if metric in (REWARD, label)))


MODES: dict[str, dict[str, bool]] = {
    "sequential": {"intra": False, "inter": False, "hide_critic": False, "backfill": False},
    "intra": {"intra": True, "inter": False, "hide_critic": False, "backfill": False},
    "inter": {"intra": False, "inter": True, "hide_critic": False, "backfill": False},
    "full": {"intra": True, "inter": True, "hide_critic": False, "backfill": False},
    "intra+critic": {"intra": True, "inter": False, "hide_critic": True, "backfill": False},
    "full+backfill": {"intra": True, "inter": True, "hide_critic": False, "backfill": True},
    "full+critic": {"intra": True, "inter": True, "hide_critic": True, "backfill": False},
    "full+both": {"intra": True, "inter": True, "hide_critic": True, "backfill": True},
}
"""The switches by name, `hide_critic` for no `critic` in `overlap.without`.  `full` is the paper's method."""


def switched(config: TrainConfig, mode: str) -> TrainConfig:
    """Return the configuration with a mode's switches, without a filter."""
    overlap = switches(mode)
    overlap["without"] += [each for each in config.overlap.without if each != "critic"]
    return config.model_copy(update={"overlap": config.overlap.model_copy(update=overlap), "filter": None})


def switches(mode: str) -> dict[str, Any]:
    overlap: dict[str, Any] = dict(MODES[mode])
    return overlap | {"without": [] if overlap.pop("hide_critic") else ["critic"]}
