"""Losses of the actor and of the critic.

Legend: T response tokens of one micro-batch (packed).  `num_tokens` is the token count of the GLOBAL minibatch: every
loss is a sum over its own tokens divided by it, so the losses and gradients of micro-batches and ranks add up to the
minibatch's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oppo_megatron.algorithms.kl import kl_per_token
from oppo_megatron.algorithms.stats import TokenStats, count, maximum, total
from oppo_megatron.config.ppo import PPOConfig


@dataclass(frozen=True)
class PolicyStats(TokenStats):
    """Sums over the tokens of a policy update.

    `loss` is the clipped surrogate with its sign turned; `clipped` counts tokens whose ratio lies outside the clip
    range; `approx_kl` is k3 of KL(old || new); `weight` sums the importance weights (1 each where there are none);
    `kl` (to the reference) and `entropy` are filled in by `actor_loss`.
    """

    loss: Tensor
    clipped: Tensor
    approx_kl: Tensor
    ratio: Tensor
    weight: Tensor
    kl: Tensor
    entropy: Tensor
    max_ratio: Tensor


@dataclass(frozen=True)
class ValueStats(TokenStats):
    """Sums over the tokens of a value update.

    `loss` is the (clipped) value loss, `clipped` counts values that moved beyond the clip range, `squared_error` is
    (value - return)^2, `value` and `target` sum the new values and the returns.
    """

    loss: Tensor
    clipped: Tensor
    squared_error: Tensor
    value: Tensor
    target: Tensor


@dataclass(frozen=True)
class ActorTargets:
    """What the actor's fresh log-probs are compared with; all [T] and without gradient.

    `old_logp_T` and `weight_T` come from `staleness.ratio_base`, the rest from the step's `Experience`.
    """

    old_logp_T: Tensor
    advantages_T: Tensor
    reference_logp_T: Tensor
    weight_T: Tensor | None = None


def policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    clip: float,
    num_tokens: int,
    weight_T: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Clipped surrogate (paper eq. 2, sign turned to be minimised), times `weight_T` where given."""
    ratio_T = (logp_T - old_logp_T).exp()
    clipped_ratio_T = ratio_T.clamp(1 - clip, 1 + clip)
    losses_T = -torch.minimum(ratio_T * advantages_T, clipped_ratio_T * advantages_T)
    if weight_T is not None:
        losses_T = losses_T * weight_T
    zero = torch.zeros((), dtype=torch.float64, device=logp_T.device)
    stats = PolicyStats(
        num_tokens=count(logp_T),
        loss=total(losses_T),
        clipped=total(ratio_T != clipped_ratio_T),
        approx_kl=total(kl_per_token(old_logp_T, logp_T, "k3")),
        ratio=total(ratio_T),
        weight=count(logp_T) if weight_T is None else total(weight_T),
        kl=zero,
        entropy=zero,
        max_ratio=maximum(ratio_T),
    )
    return losses_T.sum() / num_tokens, stats


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, value_clip: float, num_tokens: int
) -> tuple[Tensor, ValueStats]:
    """Half the larger of two squared errors: of the value, and of the value held to old +- `value_clip`.

    `value_clip` 0 leaves only the first.
    """
    error_T = (values_T - returns_T).square()
    losses_T = 0.5 * error_T
    moved_T = values_T - old_values_T
    beyond_T = torch.zeros_like(moved_T, dtype=torch.bool)
    if value_clip > 0:
        beyond_T = moved_T.abs() > value_clip
        held_T = old_values_T + moved_T.clamp(-value_clip, value_clip)
        losses_T = 0.5 * torch.maximum(error_T, (held_T - returns_T).square())
    stats = ValueStats(
        num_tokens=count(values_T),
        loss=total(losses_T),
        clipped=total(beyond_T),
        squared_error=total(error_T),
        value=total(values_T),
        target=total(returns_T),
    )
    return losses_T.sum() / num_tokens, stats


def entropy_bonus(entropy_T: Tensor, num_tokens: int) -> Tensor:
    """Mean entropy over the global minibatch, this micro-batch's share of it."""
    return entropy_T.sum() / num_tokens


def actor_loss(
    logp_T: Tensor,
    entropy_T: Tensor,
    targets: ActorTargets,
    ppo: PPOConfig,
    kl_coefficient: float,
    num_tokens: int,
) -> tuple[Tensor, PolicyStats]:
    """The actor's whole loss: clipped surrogate + KL term (only with `kl.mode: loss`) - entropy bonus.

    `kl_coefficient` is the coefficient in force (the adaptive one may differ from the configured one).  `entropy_T`
    may come without gradient when the entropy coefficient is 0: it is then only counted.
    """
    loss, stats = policy_loss(
        logp_T, targets.old_logp_T, targets.advantages_T, ppo.clip, num_tokens, weight_T=targets.weight_T
    )
    kl_T = kl_per_token(logp_T, targets.reference_logp_T, ppo.kl.estimator)
    if ppo.kl.mode == "loss":
        loss = loss + kl_coefficient * kl_T.sum() / num_tokens
    if ppo.entropy_coefficient > 0:
        loss = loss - ppo.entropy_coefficient * entropy_bonus(entropy_T, num_tokens)
    return loss, replace(stats, kl=total(kl_T), entropy=total(entropy_T))
