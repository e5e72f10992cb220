"""Rules that tie the settings of a run together.  Rules of one section are its method `rules`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from operator import attrgetter

from oppo_megatron.config.algorithm import PRESETS, AlgorithmConfig
from oppo_megatron.config.derived import best_standard, least_micro_batch, scorers
from oppo_megatron.config.evaluation import REWARD, EvaluationConfig, Standard
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.ppo import STALENESS_BOUNDS, PPOConfig, RolloutConfig
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
        if config.overlap.backfill and config.overlap.continuous is not None:
            yield (
                "overlap.backfill is set, but with overlap.continuous prompts are admitted when weights are installed; set "
                "backfill to false, and raise overlap.delta for more prompts"
            )
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


AND_NOTHING = "so that nothing is learned"


def _bounded(*objectives: str) -> Callable[[TrainConfig], bool]:
    return lambda config: config.algorithm.pairs or config.algorithm.objective in objectives


def _no_pairs(config: TrainConfig) -> bool:
    return not config.algorithm.pairs


KL = ("ppo.kl.coefficient", "ppo.kl.target", "ppo.kl.estimator")
CLIPS = ("ppo.clip", "ppo.clip_high", "ppo.dual_clip")
REMOVE, WITH_KL = "remove it", "remove it, or set ppo.kl.mode to penalty, score or loss"
Read = tuple[tuple[str, ...], Callable[[TrainConfig], bool], str, str]
"""Settings that are read only if a condition holds, why nothing reads them otherwise, and the remedy."""

READS: tuple[Read, ...] = (
    (
        ("ppo.gae_lambda", "ppo.value_clip", "ppo.critic_warmup_steps"), lambda config: config.algorithm.critic,
        "algorithm.preset {preset} has no critic", REMOVE,
    ),
    (
        (*CLIPS, "ppo.entropy_coefficient", "ppo.staleness"), _no_pairs,
        "a pair is compared by the policy and the reference alone, whoever drew it", REMOVE,
    ),
    (
        CLIPS, lambda config: config.algorithm.loss is None or config.algorithm.pairs,
        "algorithm.loss is your own function", REMOVE,
    ),
    (
        ("ppo.clip", "ppo.dual_clip"), _bounded("clip"),
        "algorithm.objective is {objective}, which does not clip by it", REMOVE,
    ),
    (("ppo.clip_high",), _bounded("clip", "cispo"), "algorithm.objective is {objective}, which has no ratio", REMOVE),
    (("algorithm.ratio",), _bounded("clip", "cispo"), "algorithm.objective {objective} has no ratio", REMOVE),
    (("algorithm.ratio",), _no_pairs, "algorithm.objective dpo has no ratio", REMOVE),
    (
        ("ppo.gamma", "ppo.reward_normalization"), _no_pairs, "of a pair only which response is the better one counts",
        REMOVE,
    ),
    (
        ("ppo.reward_normalization",), lambda config: not _scales_again(config),
        "algorithm.scale {scale} divides by the deviation of the scores again, whatever it is", REMOVE,
    ),
    (
        KL, lambda config: config.ppo.kl.mode != "none" or config.algorithm.pairs,
        "ppo.kl.mode is none (the mode of algorithm.preset {preset}, unless it is set)", WITH_KL,
    ),
    (
        KL, lambda config: config.ppo.kl.mode != "margin" or not config.algorithm.pairs,
        "with pairs the reference is in their margins alone",
        "remove it, or set dpo.beta, which holds the policy to the reference",
    ),
    (("guards.ratio_max",), _no_pairs, "algorithm.preset {preset} has no ratio", REMOVE),
    (
        ("guards.kl_mean",),
        lambda config: config.ppo.kl.mode != "none" and (config.ppo.kl.mode != "margin" or config.rollout.temperature == 1),
        "there is no KL to a reference (ppo.kl.mode; with pairs, rollout.temperature 1)", WITH_KL,
    ),
)  # fmt: skip


def unread_settings(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence per unread setting that is neither default nor preset."""
    algorithm, reported = config.algorithm, set[str]()
    preset = PRESETS[algorithm.preset]
    brought = {f"ppo.{name}": value for name, value in preset.ppo.items()}
    if algorithm.pairs:  # the others bring a KL with its mode
        brought |= {f"ppo.kl.{name}": value for name, value in preset.kl.items()}
    words = {
        "preset": algorithm.preset, "objective": algorithm.objective, "scale": algorithm.scale, "kl": config.ppo.kl.mode,
    }  # fmt: skip
    for settings, is_read, why, remedy in READS:
        if is_read(config):
            continue
        for key in settings:
            value, (section, _, name) = attrgetter(key)(config), key.rpartition(".")
            default = type(attrgetter(section)(config)).model_fields[name].default
            if key == "algorithm.ratio":
                default = "token"  # it needs no ratio
            if key not in reported and value not in (default, brought.get(key, default)):
                reported.add(key)
                shown = f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else value
                yield f"{key} is {shown}, but {why.format(**words)}, and nothing reads it; {remedy}"


def _scales_again(config: TrainConfig) -> bool:
    """True if advantages do not depend on the scale of scores."""
    algorithm, ppo = config.algorithm, config.ppo
    if ppo.truncated_score is not None or algorithm.critic or algorithm.greedy or algorithm.pairs:
        return False
    if ppo.kl.mode == "score" or (ppo.kl.mode == "penalty" and algorithm.scale == "whiten"):
        return False
    return algorithm.scale in ("group_std", "batch_std", "advantage_std", "whiten") and algorithm.baseline != "none"


def algorithm_rules(config: TrainConfig) -> Iterator[str]:
    algorithm, ppo, kl = config.algorithm, config.ppo, config.ppo.kl
    yield from _groups(config)
    yield from _greedy(config)
    yield from unread_settings(config)
    if algorithm.objective == "cispo" and ppo.clip_high is None:
        yield "ppo.clip_high is null, but algorithm.objective cispo weights log-probs by ratios up to 1 + it; set it (4 is usual)"
    yield from _staleness(algorithm, ppo)
    if algorithm.objective == "plain" and (ppo.epochs > 1 or ppo.minibatches > 1):
        yield (
            f"algorithm.objective is plain, for one optimizer step per batch, but ppo.epochs {ppo.epochs} and ppo.minibatches "
            f"{ppo.minibatches} make more; lower both to 1, or choose clip"
        )
    if kl.mode == "loss" and kl.estimator == "k1":  # its gradient is the score function, whose expectation is 0
        yield "ppo.kl.mode is loss: the gradient of ppo.kl.estimator k1 is 0 in expectation; set it to k2, k3 or k1+"
    if kl.mode in ("penalty", "score") and kl.corrected:
        yield (
            f"ppo.kl.estimator is {kl.estimator}, but ppo.kl.mode {kl.mode} has no gradient; set it to "
            f"{kl.formula}, or ppo.kl.mode to loss"
        )
    if kl.target is not None and kl.coefficient == 0 and kl.mode not in ("none", "margin"):
        yield f"ppo.kl.target is {kl.target:g}, but a ppo.kl.coefficient of 0 stays 0; raise it, or remove the target"
    yield from _pairs(config)
    preset = PRESETS[algorithm.preset]
    for name, replaced in (("advantage", ("baseline", "scale")), ("loss", ("ratio", "objective"))):
        if getattr(algorithm, name) is None:
            continue
        if algorithm.pairs:
            yield f"algorithm.{name} is set, but algorithm.preset online_dpo has pairs; remove it, or choose another preset"
            continue
        for choice in replaced:
            if getattr(algorithm, choice) != getattr(preset, choice):
                yield f"algorithm.{choice} is {getattr(algorithm, choice)}, but algorithm.{name} replaces it; remove one of them"


def _staleness(algorithm: AlgorithmConfig, ppo: PPOConfig) -> Iterator[str]:
    given, usual = ppo.staleness_bounds, STALENESS_BOUNDS[ppo.staleness]
    if algorithm.loss is not None and ppo.staleness in ("icepop", "seq_mask", "opsm"):
        yield (
            f"ppo.staleness is {ppo.staleness}, but algorithm.loss weighs its tokens itself, and the weights would be lost; set "
            "staleness to behaviour or decoupled"
        )
    if given is None:
        return
    if not usual:
        yield f"ppo.staleness_bounds is {given}, but ppo.staleness behaviour has none; remove it, or choose another staleness"
    elif (
        len(given) != len(usual) or given[0] < 0 or (len(given) == 2 and not (given[0] <= 1 <= given[1] and given[0] < given[1]))
    ):
        numbers = "one number of at least 0" if len(usual) == 1 else "two, from 0 to 1 and above 1: a fresh token weighs 1"
        yield f"ppo.staleness_bounds is {given}, but ppo.staleness {ppo.staleness} needs {numbers}; {list(usual)} is usual"


def _groups(config: TrainConfig) -> Iterator[str]:
    algorithm, batch, size = config.algorithm, config.rollout.batch_size, config.rollout.group_size
    what = f"baseline {algorithm.baseline}, scale {algorithm.scale}"
    if algorithm.greedy and algorithm.scale == "group_std":
        yield (
            "algorithm.scale is group_std, but algorithm.baseline greedy compares a response with the greedy one, and not with "
            "its group; choose scale none, batch_std, advantage_std or whiten, or a group's baseline (group_mean, others)"
        )
    elif algorithm.needs_group and size == 1:
        yield (
            f"rollout.group_size is 1, but algorithm.preset {algorithm.preset} ({what}) compares the responses to a prompt, "
            "and one has nothing to be compared with; set it to 2 or more"
        )
    if batch % size:
        lower, higher = batch // size * size, -(-batch // size) * size
        fitting = f"{lower} or {higher}" if lower else str(higher)
        yield (
            f"rollout.batch_size is {batch} responses, but must be a multiple of rollout.group_size {size} (a batch has "
            f"whole groups); set it to {fitting}, or the group size to a divisor"
        )
        return
    groups, minibatches = batch // size, config.ppo.minibatches
    if groups % minibatches:
        whole = f"the {groups} groups of a batch ({batch} responses in groups of {size})"
        unit = f"rollout.batch_size {batch}" if size == 1 else whole
        fitting = ", ".join(str(count) for count in range(1, groups + 1) if groups % count == 0)
        yield f"ppo.minibatches {minibatches} does not divide {unit}; choose from {fitting}"


def greedily(rollout: RolloutConfig) -> str | None:
    """Setting that makes every draw the most likely token, if any."""
    for name, most in (("temperature", 1e-3), ("top_k", 1), ("top_p", 1e-6)):
        value = getattr(rollout, name)
        if value <= most and (name != "top_k" or value):
            return f"rollout.{name} is {value:g}"
    return None


def _greedy(config: TrainConfig) -> Iterator[str]:
    """Sampled responses must be able to differ."""
    setting, algorithm = greedily(config.rollout), config.algorithm
    if setting is None:
        return
    if algorithm.greedy:
        why = f"every response is the greedy one that algorithm.baseline greedy compares it with, {AND_NOTHING}"
    elif algorithm.pairs:
        why = "greedy responses to a prompt are all the same, and no pair"
    elif algorithm.needs_group:
        why = f"the responses to a prompt are all the same, and compared with each other every advantage is 0, {AND_NOTHING}"
    elif config.filter is not None:
        why = "the responses to a prompt are all the same, and the filter would drop every group"
    else:
        return
    yield f"{setting}, at which {why}; sample (rollout.temperature 1, top_k 0 and top_p 1 are usual)"


def _pairs(config: TrainConfig) -> Iterator[str]:
    mode, tokens = config.ppo.kl.mode, config.runtime.micro_batch_tokens
    if not config.algorithm.pairs:
        if mode == "margin":
            preset = config.algorithm.preset
            yield f"ppo.kl.mode is margin, but algorithm.preset {preset} has no pairs; choose another, or preset online_dpo"
        return
    if mode != "margin":
        yield f"ppo.kl.mode is {mode}, but algorithm.preset online_dpo measures its pairs against the reference; remove it"
    if config.algorithm.scale != "none":
        yield f"algorithm.scale is {config.algorithm.scale}, but a pair has no advantage to be scaled; remove it"
    if config.ppo.mask_truncated:
        yield "ppo.truncated is mask, but a pair needs both of its responses; remove it, or give a score"
    longest = least_micro_batch(config)
    if longest // 2 <= tokens < longest:
        yield (
            f"runtime.micro_batch_tokens is {tokens}, but a pair may have {longest} tokens (twice data.max_prompt_tokens + "
            f"rollout.max_response_tokens) and must fit; raise it to {longest}, or lower the limits"
        )
