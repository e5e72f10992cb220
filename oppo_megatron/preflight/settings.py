"""Cross-checks: rules that tie several settings together.  Nothing is loaded; paths are checked for existence only.

Ranks and layouts are checked in `layout/checks.py`, because what fits depends on the models' shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from oppo_megatron.config.data import DataConfig, PromptDataConfig, RewardPart, RowsConfig
from oppo_megatron.config.debug import DebugConfig
from oppo_megatron.config.derived import adapters, rollback_rules, scorers
from oppo_megatron.config.guards import GuardsConfig
from oppo_megatron.config.model import ModelConfig, OptimizerConfig, RuntimeConfig
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.config.paths import check_exists, check_files
from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.layout.kernels import find_available, layers_refused
from oppo_megatron.modeldir.headers import check_adapter
from oppo_megatron.preflight.algorithm import check_algorithm
from oppo_megatron.preflight.filtering import check_filtering
from oppo_megatron.preflight.measuring import check_evaluation, check_heldout
from oppo_megatron.preflight.preferences import check_preferences
from oppo_megatron.preflight.reward_parts import check_part, check_waits
from oppo_megatron.preflight.settling import check_settle


def check_train(config: TrainConfig, *, inputs: bool = True, models: bool = True) -> list[str]:
    """Return every broken rule of `oppo train`'s settings, a sentence each.

    `inputs`, `models`: whether tokenizer and rows, and the models' folders, have to be there.
    """
    return [
        *_check_run_dir(config),
        *_check_batch(config),
        *check_overlap(config.overlap, config.rollout.batch_size, config.rollout.group_size),
        *check_forced_lengths(config.debug),
        *check_stops(config.rollout, forced=config.debug.forced_lengths is not None),
        *_check_sources(config, models),
        *check_rewards(config.rewards, has_reward_model=config.reward is not None),
        *check_waits(config.rewards, config.runtime.timeout_s, config.stall_deadline_s),
        *_check_guards(config.guards, has_kl=_has_kl(config)),
        *_check_rollback(config),
        *(check_exists("tokenizer.path", config.tokenizer.path) if inputs else []),
        *(problem for name, data in _data_of(config) for problem in check_data(name, data, ("prompt",), files=inputs)),
        *check_evaluation(config),
        *check_algorithm(config),
        *check_filtering(config),
        *check_settle(config),
        *_check_step_rewards(config),
        *_check_warmup(config),
        *(problem for name, role in config.trained.items() for problem in _check_optimizer(name, role.optimizer)),
        *check_layers(config.runtime, adapters=bool(adapters(config))),
        *(problem for name, lora in adapters(config).items() for problem in check_adapter(name, lora)),
    ]


def _data_of(config: TrainConfig) -> Iterator[tuple[str, PromptDataConfig]]:
    yield "data", config.data
    if config.evaluation is not None:
        yield "evaluation.data", config.evaluation.data


def _check_step_rewards(config: TrainConfig) -> list[str]:
    """Scores of responses are scaled, rewards of steps are not."""
    how = next((part.step_rewards for part in config.rewards if part.kind == "process"), "last")
    scaling = config.ppo.reward_normalization
    if how not in ("sum", "potential") or scaling == "none":
        return []
    return [
        f"ppo.reward_normalization is {scaling}, which scales the score of a response, but step_rewards {how} gives rewards to "
        "its steps, which stay as they are; set ppo.reward_normalization=none, or step_rewards to last or min"
    ]


def _check_warmup(config: TrainConfig) -> list[str]:
    """A run must reach beyond the critic's warm-up."""
    warming, steps = config.ppo.critic_warmup_steps, config.steps
    if not warming or steps is None or warming < steps:
        return []
    return [
        f"ppo.critic_warmup_steps is {warming}, but the run has {steps} steps, and the policy would never be trained; lower it"
    ]


def check_layers(runtime: RuntimeConfig, *, adapters: bool) -> list[str]:
    """Layers that are asked for by name must be there."""
    if runtime.layers != "transformer_engine":
        return []
    problem = layers_refused(runtime.layers, find_available(cuda=runtime.device != "cpu"), adapters=adapters)
    return [] if problem is None else [problem]


def _has_kl(config: TrainConfig) -> bool:
    """True if `kl_mean` is known: with pairs only if the draws are of the temperature of the loss."""
    mode = config.ppo.kl.mode
    return mode != "none" and (mode != "margin" or config.rollout.temperature == 1)


def _check_guards(guards: GuardsConfig, *, has_kl: bool) -> list[str]:
    """Limits that no figure, or every figure, is beyond."""
    problems = []
    if guards.ratio_max.limit is not None and guards.ratio_max.limit <= 1:
        problems.append(f"guards.ratio_max.limit is {guards.ratio_max.limit:g}, but must be greater than 1; raise it")
    if guards.ess.limit is not None and guards.ess.limit >= 1:
        problems.append(f"guards.ess.limit is {guards.ess.limit:g}, but must be less than 1; lower it")
    if guards.kl_mean.limit is not None and not has_kl:
        problems.append(
            f"guards.kl_mean.limit is {guards.kl_mean.limit:g}, but there is no KL to a reference (ppo.kl.mode), and nothing is "
            "held against it; remove it, or set ppo.kl.mode to penalty, score or loss"
        )
    return problems


def _check_rollback(config: TrainConfig) -> list[str]:
    """A guard that goes back needs checkpoints to go back to."""
    rules = rollback_rules(config)
    if not rules or config.checkpoint.every_steps:
        return []
    return [
        f"guards: {' and '.join(rules)} goes back to the last checkpoint (rollback), but checkpoint.every_steps is 0, and "
        "those by the clock are too rare for it; set checkpoint.every_steps, or choose skip or stop"
    ]


def check_supervised(config: SupervisedConfig) -> list[str]:
    """Every broken rule of a supervised run's settings."""
    return [
        *_check_run_dir(config),
        *_check_micro_batch(config.runtime.micro_batch_tokens, config.max_tokens, "max_tokens"),
        *(problem for name, model in config.models.items() for problem in check_source(name, model)),
        *check_preferences(config),
        *check_exists("tokenizer.path", config.tokenizer.path),
        *check_data("data", config.data, templates=("prompt", "completion")),
        *_check_optimizer("model", config.optimizer, key="optimizer"),
        *check_layers(config.runtime, adapters=bool(adapters(config))),
        *(problem for name, lora in adapters(config).items() for problem in check_adapter(name, lora)),
        *check_heldout(config),
        *(
            check_data("evaluation.data", config.evaluation.data, templates=("prompt", "completion"))
            if config.evaluation and config.evaluation.data
            else []
        ),
    ]


def check_overlap(overlap: OverlapConfig, batch_size: int, group_size: int = 1) -> list[str]:
    """delta's order and bound (only where it is used), the chunk candidates, and when backfill admits."""
    problems = _check_backfill(overlap)
    delta, candidates = overlap.delta, overlap.chunk.candidates
    if overlap.inter and delta.initial > delta.max:
        problems.append(
            f"overlap.delta.initial is {delta.initial}, but overlap.delta.max is {delta.max}; lower initial, or raise max"
        )
    groups = batch_size // group_size
    if overlap.inter and delta.max > overlap.max_staleness * groups:
        of = f" / rollout.group_size {group_size} = {groups} prompts" if group_size > 1 else ""
        problems.append(
            f"overlap.delta.max is {delta.max}, but must not exceed overlap.max_staleness {overlap.max_staleness} times "
            f"rollout.batch_size {batch_size}{of} (more than so many batches could not all be trained in time); lower it, or "
            "raise overlap.max_staleness"
        )
    if len(set(candidates)) < len(candidates):
        problems.append(
            f"overlap.chunk.adaptive is {candidates}, but each size may appear once; remove the repeated ones"
        )
    return problems


def _check_backfill(overlap: OverlapConfig) -> list[str]:
    problems, every, tokens = [], overlap.backfill, overlap.chunk.tokens
    if every and not overlap.inter:
        problems.append(
            f"overlap.backfill is {str(every).lower()}, but overlap.inter is false, and without it a step ends with the "
            "rollouts that it began with; set inter to true or backfill to false"
        )
    if not isinstance(every, bool) and every % tokens:
        problems.append(
            f"overlap.backfill is {every}, but must be a multiple of overlap.chunk.tokens {tokens} (rounds end where "
            f"prompts enter); set it to {-(-every // tokens) * tokens}, or the chunk to a divisor of it"
        )
    return problems


def check_forced_lengths(debug: DebugConfig) -> list[str]:
    """A trace that exists."""
    trace = None if debug.lengths is None else debug.lengths.trace
    return [] if trace is None else check_exists("debug.forced_lengths", trace)


def check_stops(rollout: RolloutConfig, *, forced: bool) -> list[str]:
    """Ids and texts that could end a response; forced lengths leave none to end."""
    problems = [
        f"rollout.stop has {i}, but ids are numbers from 0 on; correct or remove it"
        for i in rollout.stop_token_ids
        if i < 0
    ]
    if "" in rollout.stop:
        problems.append("rollout.stop has an empty text, which would end every response at once; remove it")
    if rollout.stop and forced:
        problems.append(
            "rollout.stop is set, but with debug.forced_lengths a response ends at its length only; remove one of them"
        )
    return problems


def check_stop_ids(rollout: RolloutConfig, vocab_size: int) -> list[str]:
    """Ids that the actor can draw."""
    return [
        f"rollout.stop has {i}, but the actor's vocabulary ends at {vocab_size - 1}; correct or remove it"
        for i in rollout.stop_token_ids
        if i >= vocab_size
    ]


def check_source(name: str, model: ModelConfig, *, files: bool = True) -> list[str]:
    """Exactly one of checkpoint and init, and the one given exists, unless `files` is false."""
    if (model.checkpoint is None) == (model.init is None):
        given = "neither" if model.checkpoint is None else "both"
        return [
            f"{name} has {given} of checkpoint and init, but needs exactly one; give the folder of weights or a shape"
        ]
    if not files:
        return []
    if model.checkpoint is not None:
        return check_exists(f"{name}.checkpoint", model.checkpoint)
    return [] if model.init is None or isinstance(model.init, dict) else check_exists(f"{name}.init", model.init)


def check_rewards(parts: Sequence[RewardPart], *, has_reward_model: bool) -> list[str]:
    """Each part has what its kind needs and nothing else; the reward model is there if and only if it is used."""
    problems = [problem for index, part in enumerate(parts) for problem in check_part(f"rewards.{index}", part)]
    if all(part.weight == 0 for part in parts):
        problems.append(
            "every part of rewards has weight 0, so that every reward is 0 and nothing is learned; give one another weight"
        )
    num_models = sum(part.reads_model for part in parts)
    if num_models > 1:
        problems.append(f"rewards names the reward model {num_models} times, but once is allowed; add their weights up")
    if num_models and not has_reward_model:
        problems.append(
            "rewards has a part of kind model or process, but there is no `reward` section; add it with the model's checkpoint"
        )
    if has_reward_model and not num_models:
        problems.append(
            "a `reward` section is given, but no part of rewards has kind model or process; add `- kind: model` or remove it"
        )
    return problems


def check_data(name: str, data: RowsConfig, templates: Sequence[str], *, files: bool = True) -> list[str]:
    """The files exist, unless `files` is false, and each used template has the place for its text."""
    paths = data.path if isinstance(data.path, list) else [data.path]
    problems = [f"{name}.path is an empty list; name at least one file"] if not paths else []
    for path in paths if files else ():
        problems += check_files(f"{name}.path", path)
    for part in templates:
        template = data.completion_template if part == "completion" and isinstance(data, DataConfig) else data.prompt_template
        if "{" + part + "}" not in template:
            problems.append(
                f"{name}.{part}_template is {template!r}, but must contain `{{{part}}}` where the text goes; add it"
            )
    return problems


def _check_run_dir(config: TrainConfig | SupervisedConfig) -> list[str]:
    if config.run_dir.exists() and not config.run_dir.is_dir():
        return [f"run_dir `{config.run_dir}` is a file, but must be a folder; name another"]
    existing = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            f"run_dir `{config.run_dir}`: nothing can be written in `{existing}`; choose a folder that you may write"
        ]
    return []


def _check_batch(config: TrainConfig) -> list[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    what = "data.max_prompt_tokens + rollout.max_response_tokens"
    return _check_micro_batch(config.runtime.micro_batch_tokens, longest, what)


def _check_micro_batch(micro_batch_tokens: int, longest: int, what: str) -> list[str]:
    if micro_batch_tokens >= longest:
        return []
    return [
        f"runtime.micro_batch_tokens is {micro_batch_tokens}, but one sequence may have {longest} tokens ({what}) "
        "and must fit; raise it or lower the limits"
    ]


def _check_sources(config: TrainConfig, files: bool) -> list[str]:
    roles: list[tuple[str, ModelConfig]] = [("actor", config.actor), *scorers(config)]
    problems = [problem for name, role in roles for problem in check_source(name, role, files=files)]
    for name, role in roles:
        if role.fresh_head and name in ("actor", "reference"):
            problems.append(f"{name}.fresh_head is true, but only reward and critic have a scalar head; remove it")
    return problems


def _check_optimizer(name: str, optimizer: OptimizerConfig, key: str | None = None) -> list[str]:
    where = key or f"{name}.optimizer"
    if optimizer.min_lr > optimizer.rate:
        return [f"{where}.min_lr is {optimizer.min_lr}, but must not exceed lr {optimizer.rate}; lower it"]
    if optimizer.min_lr and optimizer.decay == "constant":
        return [
            f"{where}.min_lr is {optimizer.min_lr}, but {where}.decay is constant, and nothing reads it; set it to 0, or decay "
            "to linear or cosine"
        ]
    return []
