"""Rules of `settle`: when ending responses early does not change the expected gradient.

An advantage that depends on rewards alone is the same whatever follows a settled prefix, and the score function of what
follows has mean 0.  So nothing is lost if the weight of a token does not depend on the length of its response, and if each
token was drawn by the policy at which the gradient is taken, from the distribution whose log-probs are trained.
"""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.derived import settle_period
from oppo_megatron.config.evaluation import part_labels
from oppo_megatron.config.run import TrainConfig

OR_OFF = "or set settle.mode to predicted, which is biased, or to off"


def settle_rules(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each broken rule of `settle`; settings that are not read are in `algorithm_rules.READS`."""
    if config.settle.mode == "off":
        return
    yield from _never_asked(config)
    yield from _never_settled(config)
    if config.settle.mode == "certain":
        yield from _biased(config)


def _never_asked(config: TrainConfig) -> Iterator[str]:
    """The period must be shorter than the longest response."""
    period, longest = settle_period(config), config.rollout.max_response_tokens
    if period is not None and period >= longest:
        what = "settle.every is" if config.settle.every else "settle.every is null, and rewards are asked every"
        yield (
            f"{what} {period} decode steps, but rollout.max_response_tokens is {longest}, so that responses end before "
            f"a reward is asked whether they are settled; set settle.every below {longest} (to a quarter of it, say), or set "
            "settle.mode to off"
        )


def _never_settled(config: TrainConfig) -> Iterator[str]:
    """Every part of the reward must be able to settle a prefix."""
    for part, label in zip(config.rewards, part_labels(config.rewards), strict=True):
        if (why := _silent(part)) is not None:
            yield (
                f"settle.mode is {config.settle.mode}, but reward part {label!r} {why}, and a response ends early only if all "
                "parts say that nothing changes their rewards any more; set settle.mode to off, or leave the part out"
            )


def _silent(part: RewardPart) -> str | None:
    """Return why a part of this kind settles nothing; None if it may."""
    if part.reads_model:
        return "is a model's score"
    if part.kind == "http":
        return "is a service's score"
    if part.name in ("gsm8k", "arithmetic"):
        return "goes by the last answer in a response (rule gsm8k_first goes by the first, and settles)"
    return f"is of rule {part.name}, which reads the end of a response" if part.name in ("math", "length", "code") else None


def _biased(config: TrainConfig) -> Iterator[str]:
    for what, why, remedy in (
        *_reductions(config),
        *_lengths_read(config),
        *_other_policies(config),
        *_other_distributions(config),
    ):
        yield f"settle.mode is certain, but {what}, and {why}; {remedy}, {OR_OFF}"


Refused = Iterator[tuple[str, str, str]]
"""A setting, why ending early would then change the expected gradient, and what to set instead."""


def _reductions(config: TrainConfig) -> Refused:
    algorithm, ppo = config.algorithm, config.ppo
    if algorithm.pairs:
        why = "the loss of a pair depends on all tokens of its responses"
        yield f"algorithm.preset is {algorithm.preset}", why, "choose one whose loss is a sum over tokens (dr_grpo)"
        return
    if algorithm.reduction not in ("constant", "sequence_sum"):
        why = "the weight of a token would change with the length of its response"
        yield f"algorithm.reduction is {algorithm.reduction}", why, "set it to constant or sequence_sum"
    if algorithm.critic:
        why = "a critic's advantages depend on what follows"
        yield "algorithm.baseline is critic", why, "choose a preset without one (dr_grpo)"
    if algorithm.scale == "whiten":
        why = "the mean and deviation over tokens change with lengths"
        yield "algorithm.scale is whiten", why, "set it to none, group_std, batch_std or advantage_std"
    if ppo.kl.mode != "none":
        yield f"ppo.kl.mode is {ppo.kl.mode}", "the KL of the tokens that are cut off would be missing", "set it to none"
    if ppo.entropy_coefficient:
        why = "the entropy bonus of what is cut off would be missing"
        yield f"ppo.entropy_coefficient is {ppo.entropy_coefficient:g}", why, "set it to 0"
    if ppo.gamma != 1:
        why = "a token's reward is discounted by the tokens that follow"
        yield f"ppo.gamma is {ppo.gamma:g}", why, "set it to 1"


def _lengths_read(config: TrainConfig) -> Refused:
    ppo, overlong = config.ppo, config.overlong
    why = "a response that ends early does not reach the limit"
    if overlong.buffer is not None:
        yield f"overlong.buffer is {overlong.buffer}", why, "set it to null"
    if overlong.mask:
        yield "overlong.mask is true", why, "set it to false"
    if ppo.truncated_score is not None:
        yield f"ppo.truncated_score is {ppo.truncated_score:g}", why, "set it to null"
    if ppo.missing_eos_penalty:
        yield f"ppo.missing_eos_penalty is {ppo.missing_eos_penalty:g}", why, "set it to 0"


def _other_policies(config: TrainConfig) -> Refused:
    ppo = config.ppo
    for name in ("epochs", "minibatches"):
        if (value := getattr(ppo, name)) != 1:
            why = "later updates of a batch have ratios and clips of the tokens that are cut off"
            yield f"ppo.{name} is {value}", why, "set it to 1"
    if config.overlap.carries(filtered=config.filter is not None):
        why = "tokens of older policies weigh by their ratios, and responses that end soon are trained first"
        remedy = "set overlap.inter to false (with a filter: overlap.delta.initial and overlap.delta.max to 0)"
        yield "overlap.inter is true and carries responses to the next step", why, remedy


def _other_distributions(config: TrainConfig) -> Refused:
    rollout = config.rollout
    why = "tokens are then not drawn from the distribution whose log-probs are trained"
    if rollout.temperature == 0:
        yield "rollout.temperature is 0", why, "set it above 0"
    if rollout.top_k:
        yield f"rollout.top_k is {rollout.top_k}", why, "set it to 0"
    if rollout.top_p != 1:
        yield f"rollout.top_p is {rollout.top_p:g}", why, "set it to 1"
