"""Rules that tie the settings of a run together.  Rules of one section are its method `rules`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from oppo_megatron.config.algorithm_rules import algorithm_rules
from oppo_megatron.config.derived import best_standard, scorers
from oppo_megatron.config.evaluation import REWARD, EvaluationConfig, Standard
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.rewards import check_part, check_rewards, check_waits, part_labels
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SupervisedConfig


def train_rules(config: TrainConfig) -> Iterator[str]:
    """Rules without files, models and layouts."""
    rollout, overlap = config.rollout, config.overlap
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    yield from _fits(config.runtime.micro_batch_tokens, longest, "data.max_prompt_tokens + rollout.max_response_tokens")
    yield from overlap.rules(rollout.batch_size, rollout.group_size)
    yield from rollout.rules()
    roles: list[tuple[str, ModelConfig]] = [("actor", config.actor), *scorers(config)]
    for name, role in roles:
        yield from role.rules(name)
    yield from check_rewards(config.rewards, has_reward_model=config.reward is not None)
    yield from check_waits(config.rewards, config.runtime.timeout_s, config.stall_deadline_s)
    if config.guards.action == "rollback" and not config.checkpoint.every_steps:
        yield "guards.action is rollback, but checkpoint.every_steps is 0; set it, because checkpoints by the clock are too rare"
    yield from config.data.rules("data", ("prompt",))
    if config.evaluation is not None:
        yield from config.evaluation.data.rules("evaluation.data", ("prompt",))
        yield from _evaluation(config, config.evaluation)
    yield from _standards(config)
    yield from algorithm_rules(config)
    yield from _filter(config)
    how = next((part.step_rewards for part in config.rewards if part.kind == "process"), "last")
    scaling = config.ppo.reward_normalization
    if how in ("sum", "potential") and scaling != "none":  # scores of responses are scaled, rewards of steps are not
        yield (
            f"ppo.reward_normalization is {scaling}, but does not scale the rewards of steps (step_rewards {how}); set it to "
            "none, or step_rewards to last or min"
        )
    warming, steps = config.ppo.critic_warmup_steps, config.steps
    if warming and steps is not None and warming >= steps:
        yield f"ppo.critic_warmup_steps is {warming}, but the run has {steps} steps: the policy would never be trained; lower it"
    for name, trained in config.trained.items():
        yield from trained.optimizer.rules(f"{name}.optimizer")


def supervised_rules(config: SupervisedConfig) -> Iterator[str]:
    yield from _fits(config.runtime.micro_batch_tokens, config.max_tokens, "max_tokens")
    for name, model in config.models.items():
        yield from model.rules(name)
    if isinstance(config, DPOConfig):
        yield from config.dpo.rules()
        longest, tokens = 2 * config.max_tokens, config.runtime.micro_batch_tokens
        if config.of_pairs and tokens < longest:
            yield (
                f"runtime.micro_batch_tokens is {tokens}, but a pair may have {longest} tokens (twice max_tokens "
                f"{config.max_tokens}) and must fit; raise it to {longest}, or lower max_tokens to {tokens // 2}"
            )
        if config.dpo.loss == "kto" and config.batch_size < 2:
            yield "batch_size is 1, but dpo.loss kto compares rows of a batch; raise it, or choose dpo.loss=apo_zero_unpaired"
    columns = config.data.columns
    if isinstance(config, RewardModelConfig) and config.of_pairs and ("completions" in columns or "labels" in columns):
        yield 'data.columns names steps or their labels, but separator is null; set it, as in `separator: "\\n"`, or name chosen'
    yield from config.data.rules("data", ("prompt", "completion"))
    yield from config.optimizer.rules("optimizer")
    yield from heldout_rules(config)
    evaluation = config.evaluation
    if evaluation is not None and evaluation.data is not None:
        yield from evaluation.data.rules("evaluation.data", ("prompt", "completion"))


def heldout_rules(config: SupervisedConfig) -> Iterator[str]:
    """Rules of held-out rows and their metrics."""
    evaluation = config.evaluation
    if evaluation is not None and (evaluation.data is None) == (evaluation.fraction is None):
        given = "neither" if evaluation.data is None else "both"
        yield f"evaluation has {given} of data and fraction, but needs one; give files, or a share as evaluation.fraction=0.05"
    else:
        yield from _standards(config)


def _fits(micro_batch_tokens: int, longest: int, what: str) -> Iterator[str]:
    if micro_batch_tokens < longest:
        yield (
            f"runtime.micro_batch_tokens is {micro_batch_tokens}, but one sequence may have {longest} tokens ({what}) "
            "and must fit; raise it or lower the limits"
        )


def _filter(config: TrainConfig) -> Iterator[str]:
    if config.filter is None:
        return
    if not config.overlap.backfill:
        yield "filter is set, but overlap.backfill is false, and nothing would take the places of dropped groups; set it to true"
    if config.rollout.group_size == 1 and not config.algorithm.greedy:
        yield "filter is set, but rollout.group_size is 1, and every group would be dropped; raise it, or set filter to null"
    known = [REWARD, *part_labels(config.rewards)]
    if config.filter not in known:
        near = difflib.get_close_matches(config.filter, known, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"choose from {', '.join(known)}"
        yield f"filter is {config.filter!r}, but no part of rewards has that name; {remedy}"


def _evaluation(config: TrainConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    for index, part in enumerate(evaluation.metrics):
        yield from check_part(f"evaluation.metrics.{index}", part)
    models = [part.kind for part in evaluation.metrics if part.reads_model]
    if len(models) > 1:
        yield "evaluation.metrics names the reward model more than once; once is enough"
    if models and config.reward is None:
        yield "evaluation.metrics has a part of kind model or process, but the run has no reward model; add one to `rewards`"
    elif models:
        trained = next((part.kind for part in config.rewards if part.reads_model), models[0])
        if models[0] != trained:
            yield f"evaluation.metrics has a part of kind {models[0]}, but `rewards` one of kind {trained}; write kind {trained}"
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield f"evaluation.samples is {evaluation.samples}, but greedy responses are all the same; set evaluation.temperature"


def _standards(config: TrainConfig | SupervisedConfig) -> Iterator[str]:
    """Metrics of `early_stop` and `checkpoint.keep_best` are measured."""
    rules = config.checkpoint
    if config.early_stop is not None:
        yield from _metric("early_stop.metric", config.early_stop.metric, config)
    if isinstance(rules.keep_best, str) and rules.keep_best != config.ALWAYS_MEASURED:
        yield from _metric("checkpoint.keep_best", rules.keep_best, config)
    if rules.keep_best is True and best_standard(config) is None:
        yield "checkpoint.keep_best is true, but nothing is measured during the run; set evaluation.every_steps"


def _metric(key: str, text: str, config: TrainConfig | SupervisedConfig) -> Iterator[str]:
    names, metric = config.measured, Standard.of(text).metric
    if not names:
        yield f"{key} is {metric!r}, but nothing is measured during the run; set evaluation.every_steps"
    elif metric not in names:
        yield f"{key} is {metric!r}, which the evaluation does not measure; choose from {', '.join(names)}"
