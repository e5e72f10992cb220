"""Rules that tie the choices of an algorithm, its companions and the groups together."""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.derived import least_micro_batch
from oppo_megatron.config.ppo import KLConfig, PPOConfig, RolloutConfig
from oppo_megatron.config.run import TrainConfig

OF_POLICIES = ("clip", "clip_high", "dual_clip", "entropy_coefficient", "staleness")
"""Settings of `ppo` about ratios of policies, and its entropy."""
AND_NOTHING = "so that nothing is learned"


def check_algorithm(config: TrainConfig) -> list[str]:
    """Every broken rule of `algorithm`, `ppo` and `rollout.group_size`, a sentence each."""
    return [
        *_check_groups(config),
        *_check_greedy(config),
        *_check_unread(config),
        *_check_unread_kl(config),
        *_check_objective(config),
        *_check_kl(config.ppo),
        *_check_pairs(config),
        *_check_custom(config),
    ]


def _check_groups(config: TrainConfig) -> Iterator[str]:
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
    """The setting under which every draw is the likeliest token; None if there is none."""
    for name, most in (("temperature", 1e-3), ("top_k", 1), ("top_p", 1e-6)):
        value = getattr(rollout, name)
        if value <= most and (name != "top_k" or value):
            return f"rollout.{name} is {value:g}"
    return None


def _check_greedy(config: TrainConfig) -> Iterator[str]:
    """What is sampled must be able to differ from what it is compared with."""
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


def _check_unread(config: TrainConfig) -> Iterator[str]:
    """Settings that nothing reads beside what was chosen."""
    algorithm, ppo = config.algorithm, config.ppo
    unread: dict[str, tuple[str, ...]] = {}
    if not algorithm.critic:
        unread[f"algorithm.preset {algorithm.preset} has no critic"] = (
            "gae_lambda",
            "value_clip",
            "critic_warmup_steps",
        )
    if algorithm.pairs:
        unread["a pair is compared by the policy and the reference alone, whoever drew it"] = OF_POLICIES
        unread["of a pair only which response is the better one counts"] = ("gamma", "reward_normalization")
    elif algorithm.loss is not None:
        unread["algorithm.loss is your own function"] = ("clip", "clip_high", "dual_clip")
    elif algorithm.objective == "plain":
        unread["algorithm.objective is plain, which has no ratio"] = ("clip", "clip_high", "dual_clip")
    elif algorithm.objective == "cispo":
        unread["algorithm.objective is cispo, whose bound is ppo.clip_high"] = ("clip", "dual_clip")
    if _scales_again(config):
        why = f"algorithm.scale {algorithm.scale} divides by the deviation of the scores again, whatever it is"
        unread[why] = ("reward_normalization",)
    usual, of_preset = PPOConfig(), PRESETS[algorithm.preset].ppo  # what a preset brings is not the user's to remove
    for why, names in unread.items():
        for name in names:
            if getattr(ppo, name) not in (getattr(usual, name), of_preset.get(name, getattr(usual, name))):
                yield f"ppo.{name} is {getattr(ppo, name)}, but {why}, and nothing reads it; remove it"


def _scales_again(config: TrainConfig) -> bool:
    """True if advantages are the same whatever scores are multiplied by, and nothing is added to scores after their scaling."""
    algorithm, ppo = config.algorithm, config.ppo
    added = ppo.truncated_score is not None or ppo.missing_eos_penalty or config.overlong.buffer is not None
    if added or algorithm.critic or algorithm.greedy or ppo.kl.mode in ("penalty", "score"):
        return False
    return algorithm.scale in ("group_std", "batch_std", "advantage_std", "whiten") and algorithm.baseline != "none"


def _check_unread_kl(config: TrainConfig) -> Iterator[str]:
    """Settings of a KL where there is none."""
    kl, preset = config.ppo.kl, config.algorithm.preset
    if kl.mode == "margin":
        usual = KLConfig(**PRESETS["online_dpo"].kl)
        why = "with pairs the reference is in their margins alone"
        remedy = "or set dpo.beta, which holds the policy to the reference"
    elif kl.mode == "none" and not config.algorithm.pairs:
        usual = KLConfig()
        why = f"ppo.kl.mode is none (that of algorithm.preset {preset}, unless it is set)"
        remedy = "or set ppo.kl.mode to penalty, score or loss"
    else:
        return
    for name in ("coefficient", "target", "estimator", "gradient"):
        if getattr(kl, name) != getattr(usual, name):
            yield f"ppo.kl.{name} is {getattr(kl, name)}, but {why}, and nothing reads it; remove it, {remedy}"


def _check_objective(config: TrainConfig) -> Iterator[str]:
    algorithm, ppo = config.algorithm, config.ppo
    if algorithm.objective == "cispo" and ppo.clip_high is None:
        yield "ppo.clip_high is null, but algorithm.objective cispo weights log-probs by ratios up to 1 + it; set it (4 is usual)"
    if algorithm.objective == "plain" and (ppo.epochs > 1 or ppo.minibatches > 1):
        yield (
            f"algorithm.objective is plain, whose gradient is that of the policy that sampled, but ppo.epochs {ppo.epochs} and "
            f"ppo.minibatches {ppo.minibatches} make further updates of the same batch; set both to 1, or choose clip"
        )
    if algorithm.ratio != "token" and algorithm.objective in ("plain", "dpo"):
        yield f"algorithm.ratio is {algorithm.ratio}, but algorithm.objective {algorithm.objective} has no ratio; remove it"
    if algorithm.scale != "none" and algorithm.pairs:
        yield f"algorithm.scale is {algorithm.scale}, but a pair has no advantage to be scaled; remove it"


def _check_custom(config: TrainConfig) -> Iterator[str]:
    """Choices that a user's functions replace, and pairs, which have no place for one."""
    algorithm = config.algorithm
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


def _check_pairs(config: TrainConfig) -> Iterator[str]:
    """What pairs of responses need, and what they have no place for."""
    mode, tokens = config.ppo.kl.mode, config.runtime.micro_batch_tokens
    if not config.algorithm.pairs or config.dpo is None:
        if mode == "margin":
            yield (
                f"ppo.kl.mode is margin, but algorithm.preset {config.algorithm.preset} has no pairs; choose penalty, score, "
                "loss or none, or preset online_dpo"
            )
        return
    if mode != "margin":
        why = "without which no margin is known" if mode == "none" else "and has no term of the KL"
        yield (
            f"ppo.kl.mode is {mode}, but algorithm.preset online_dpo measures its pairs against the reference, {why}; remove it"
        )
    if config.overlong.mask:
        yield (
            "overlong.mask is true, but a pair needs both of its responses; remove it, or make cut responses the worse ones "
            "with ppo.missing_eos_penalty"
        )
    if config.guards.ratio_max.limit is not None:
        yield (
            f"guards.ratio_max.limit is {config.guards.ratio_max.limit:g}, but algorithm.preset online_dpo has no ratio; "
            "remove it"
        )
    longest = least_micro_batch(config)
    if longest // 2 <= tokens < longest:
        yield (
            f"runtime.micro_batch_tokens is {tokens}, but a pair may have {longest} tokens (twice data.max_prompt_tokens + "
            f"rollout.max_response_tokens) and must fit, for it cannot be divided; raise it to {longest}, or lower the limits"
        )


def _check_kl(ppo: PPOConfig) -> Iterator[str]:
    """A loss term must pull: the gradient of k1 is the score function, whose expectation is 0."""
    if ppo.kl.mode == "loss" and ppo.kl.estimator == "k1" and ppo.kl.gradient == "estimator":
        yield (
            "ppo.kl.mode is loss, but the gradient of ppo.kl.estimator k1 is 0 in expectation, so that nothing would hold the "
            "policy to the reference; set ppo.kl.estimator to k2, which has the KL's gradient, or to k3"
        )
    if ppo.kl.target is not None and ppo.kl.coefficient == 0 and ppo.kl.mode not in ("none", "margin"):
        yield (
            f"ppo.kl.target is {ppo.kl.target:g}, but ppo.kl.coefficient is 0, and a coefficient that is multiplied to follow "
            "the target stays 0; raise the coefficient, or remove the target"
        )
    if ppo.kl.mode != "loss" and ppo.kl.gradient == "reverse":
        yield f"ppo.kl.gradient is reverse, but ppo.kl.mode {ppo.kl.mode} has no gradient; remove it, or set ppo.kl.mode to loss"
