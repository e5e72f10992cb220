"""Losses of actor and critic, KL estimates and the weights of a reduction.

T: response tokens of a micro-batch (packed), R: its responses.  `num_tokens` counts the global minibatch and divides every loss,
so losses and gradients of micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from oppo_megatron.algorithms.custom import CustomLoss
from oppo_megatron.algorithms.packed import TokenStats, count, maximum, row_sums, to_tokens, total
from oppo_megatron.config.algorithm import AlgorithmConfig, Objective, Ratio, Reduction
from oppo_megatron.config.ppo import PPOConfig

Estimator = Literal["k1", "k2", "k3"]


def kl_per_token(logp_T: Tensor, reference_logp_T: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(actor || reference) in nats, [T], with d = log actor - log reference (J. Schulman 2020):

    k1 = d                unbiased; as a loss, its expected gradient is zero
    k2 = d^2 / 2          biased; its expected gradient is the KL's
    k3 = exp(-d) - 1 + d  unbiased; expected gradient of KL(reference || actor)
    """
    d_T = logp_T - reference_logp_T
    if estimator == "k1":
        return d_T
    return 0.5 * d_T.square() if estimator == "k2" else torch.expm1(-d_T) + d_T


def row_weights(
    lengths_N: Sequence[int], group_size: int, reduction: Reduction, longest: int, counted_N: Sequence[bool] | None = None
) -> list[float]:
    """Weight of a token of each response, in units of 1/T (T: the minibatch's tokens).

    token_mean        1/T                     sequence_mean     1/(N |o|)          constant     1/(N L_max)
    group_token_mean  1/(G tokens of group)   sequence_sum      1/N

    G groups; L_max: `longest` (arXiv 2503.20783).  Rows not in `counted_N` weigh 0 but count in N and G (as in TRL 1.12.0).
    """
    num_tokens, num_rows = sum(lengths_N), len(lengths_N)
    counted_N = [True] * num_rows if counted_N is None else counted_N
    left_N = [length * counted for length, counted in zip(lengths_N, counted_N, strict=True)]
    if reduction == "token_mean":
        weights = [num_tokens / max(1, sum(left_N))] * num_rows
    elif reduction == "sequence_mean":
        weights = [num_tokens / (num_rows * length) for length in lengths_N]
    elif reduction == "constant":
        weights = [num_tokens / (num_rows * longest)] * num_rows
    elif reduction == "sequence_sum":
        weights = [num_tokens / num_rows] * num_rows
    else:
        of_group = [sum(left_N[first : first + group_size]) for first in range(0, num_rows, group_size)]
        weights = [num_tokens / (len(of_group) * max(1, of_group[row // group_size])) for row in range(num_rows)]
    return [weight * counted for weight, counted in zip(weights, counted_N, strict=True)]


@dataclass(frozen=True)
class PolicyStats(TokenStats):
    loss: Tensor  # surrogate to be minimised, weighted as in the loss
    clipped: Tensor  # tokens whose gradient the ratio's bounds take away (cispo: reduce)
    approx_kl: Tensor  # k3 of KL(old || new)
    ratio: Tensor
    weight: Tensor  # importance weights
    masked: Tensor  # tokens of weight 0
    kl: Tensor  # to the reference; like `entropy` filled in by `actor_loss`
    entropy: Tensor
    fresh_gradient: Tensor  # sum of |advantage| * loss weight, over responses without tokens of an older policy
    fresh_lost: Tensor  # the part that the bounds take away
    stale_gradient: Tensor  # the same over responses with tokens of an older policy
    stale_lost: Tensor
    max_ratio: Tensor


@dataclass(frozen=True)
class ValueStats(TokenStats):
    loss: Tensor
    clipped: Tensor  # values whose gradient the clip range takes away
    squared_error: Tensor
    value: Tensor
    target: Tensor


@dataclass(frozen=True)
class ActorTargets:
    """All but `lengths_R` are [T] and without gradient."""

    old_logp_T: Tensor
    advantages_T: Tensor
    reference_logp_T: Tensor | None = None
    weight_T: Tensor | None = None  # importance weights of `ratio_base`; None: 1
    share_T: Tensor | None = None  # from `row_weights`; None: 1
    lengths_R: Tensor | None = None  # needed for ratios of whole responses
    stale_T: Tensor | None = None  # True if the token's response has tokens of an older policy; None: none has
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # for `CustomLoss`, like `counts`
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Surrogate:
    clip: float
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    ratio: Ratio = "token"
    objective: Objective = "clip"
    custom: CustomLoss | None = None

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, ppo: PPOConfig, custom: CustomLoss | None = None) -> Surrogate:
        assert algorithm.objective != "dpo", "the loss of pairs is another one"
        cap = 1 + ppo.clip_high if algorithm.objective == "cispo" and ppo.clip_high is not None else None
        return cls(ppo.clip, ppo.clip_high, ppo.dual_clip, cap, algorithm.ratio, algorithm.objective, custom)

    @property
    def range(self) -> tuple[float, float]:
        return 1 - self.clip, 1 + (self.clip if self.clip_high is None else self.clip_high)


def log_ratios(logp_T: Tensor, old_logp_T: Tensor, ratio: Ratio, lengths_R: Tensor | None) -> Tensor:
    """Log ratios, [T]; responses: `sequence` mean (arXiv 2507.18071 eq. 7), `sequence_token` eq. 14, `sequence_product` sum."""
    d_T = logp_T - old_logp_T
    if ratio == "token":
        return d_T
    assert lengths_R is not None, f"ratio {ratio} needs the lengths of the responses"
    sums_R = row_sums(d_T, lengths_R)
    if ratio == "sequence_product":
        return to_tokens(sums_R, lengths_R, d_T.numel())
    means_T = to_tokens(sums_R / lengths_R, lengths_R, d_T.numel())
    return means_T if ratio == "sequence" else means_T.detach() + (d_T - d_T.detach())


def ratio_base(
    behaviour_logp_T: Tensor, proximal_logp_T: Tensor | None, advantages_T: Tensor, lengths_B: Tensor, ppo: PPOConfig,
    ratio: Ratio = "token",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Base log-probs and importance weights, [T] (None: 1), with w = proximal / behaviour and bounds of `ppo.staleness_bounds`:

    decoupled  proximal, w clamped (Hilton et al. 2022; AReaL, arXiv 2505.24298)
    icepop     proximal, w, or 0 outside (Ring-1T)
    seq_mask   proximal, w, or 0 for a response whose geometric mean of w is outside (NeMo-RL's seq-mask-tis)
    opsm       behaviour, 1, or 0 for a response with negative advantage and mean -log w above the bound (DeepSeek-V3.2, eq. 9)

    `proximal_logp_T` None: all tokens are the policy's own, and every w is 1.
    """
    behaviour_logp_T = behaviour_logp_T.detach()
    if ppo.staleness == "behaviour" or proximal_logp_T is None:
        return behaviour_logp_T, None
    proximal_logp_T = proximal_logp_T.detach()
    if ppo.staleness == "opsm":
        means_T = log_ratios(behaviour_logp_T, proximal_logp_T, "sequence", lengths_B)
        left_T = (advantages_T < 0) & (means_T > ppo.bounds[0])
        return behaviour_logp_T, (~left_T).to(behaviour_logp_T.dtype)
    low, high = ppo.bounds
    weight_T = log_ratios(proximal_logp_T, behaviour_logp_T, ratio, lengths_B).exp()
    if ppo.staleness == "decoupled":
        return proximal_logp_T, weight_T.clamp(low, high)
    judged_T = weight_T
    if ppo.staleness == "seq_mask":
        judged_T = log_ratios(proximal_logp_T, behaviour_logp_T, "sequence", lengths_B).exp()
    return proximal_logp_T, weight_T.where((judged_T >= low) & (judged_T <= high), 0.0)


Terms = Callable[[Tensor, Tensor, Tensor, Surrogate], tuple[Tensor, Tensor]]
"""(log-probs, ratios, advantages, bounds) -> token losses and the lost share of their gradient; all [T]."""


def _clip(logp_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
    """A token whose ratio has left the range in the direction that its advantage favours loses its gradient."""
    gains_T, held_T = ratio_T * advantages_T, ratio_T.clamp(*surrogate.range) * advantages_T
    losses_T, lost_T = -torch.minimum(gains_T, held_T), held_T < gains_T
    if surrogate.dual_clip is not None:
        most_T = torch.where(advantages_T < 0, -surrogate.dual_clip * advantages_T, torch.inf)
        lost_T = lost_T | (most_T < losses_T)
        losses_T = torch.minimum(losses_T, most_T)
    return losses_T, lost_T.to(ratio_T.dtype)


def _cispo(logp_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
    """The ratio is a constant weight of the log-prob; a token loses the part of it above `ratio_cap`."""
    assert surrogate.ratio_cap is not None, "objective cispo needs a ratio_cap"
    capped_T = ratio_T.detach().clamp(max=surrogate.ratio_cap)
    kept_T = (surrogate.ratio_cap / ratio_T.detach()).clamp(max=1)  # finite for a ratio of 0, too
    return -capped_T * advantages_T * logp_T, (1 - kept_T) * (advantages_T != 0)


def _plain(logp_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, surrogate: Surrogate) -> tuple[Tensor, Tensor]:
    return -advantages_T * logp_T, torch.zeros_like(ratio_T)


OBJECTIVES: Mapping[Objective, Terms] = {"clip": _clip, "cispo": _cispo, "plain": _plain}


def policy_loss(logp_T: Tensor, targets: ActorTargets, surrogate: Surrogate, num_tokens: int) -> tuple[Tensor, PolicyStats]:
    """Importance-weighted surrogate (`clip`: minus paper eq. 2) and statistics."""
    old_logp_T, lengths_R = targets.old_logp_T, targets.lengths_R
    ratio_T = log_ratios(logp_T, old_logp_T, surrogate.ratio, lengths_R).exp()
    if surrogate.custom is not None:
        assert lengths_R is not None, "a custom loss is called once per response"
        given = {"old_logp": old_logp_T, "advantages": targets.advantages_T, **targets.columns}
        if targets.reference_logp_T is not None:
            given["reference_logp"] = targets.reference_logp_T
        losses_T = surrogate.custom.losses(logp_T, given, lengths_R.tolist(), {"num_tokens": num_tokens, **targets.counts})
        lost_T = torch.zeros_like(ratio_T)
    else:
        losses_T, lost_T = OBJECTIVES[surrogate.objective](logp_T, ratio_T, targets.advantages_T, surrogate)
        if surrogate.objective == "clip" and surrogate.ratio == "sequence_product":  # one term, shared by its tokens
            assert lengths_R is not None
            losses_T = losses_T / to_tokens(lengths_R, lengths_R, losses_T.numel())
    if targets.weight_T is not None:
        losses_T = losses_T * targets.weight_T
    losses_T = shared(losses_T, targets.share_T)

    size_T = shared(shared(targets.advantages_T.abs(), targets.weight_T), targets.share_T)
    stale_T = torch.zeros_like(size_T) if targets.stale_T is None else targets.stale_T.to(size_T.dtype)
    fresh_T, stale_T = size_T * (1 - stale_T), size_T * stale_T
    zero = torch.zeros((), dtype=torch.float64, device=logp_T.device)
    stats = PolicyStats(
        num_tokens=count(logp_T),
        loss=total(losses_T),
        clipped=total(lost_T > 0),
        approx_kl=total(kl_per_token(old_logp_T, logp_T, "k3")),
        ratio=total(ratio_T),
        weight=count(logp_T) if targets.weight_T is None else total(targets.weight_T),
        masked=zero if targets.weight_T is None else total(targets.weight_T == 0),
        kl=zero,
        entropy=zero,
        fresh_gradient=total(fresh_T),
        fresh_lost=total(fresh_T * lost_T),
        stale_gradient=total(stale_T),
        stale_lost=total(stale_T * lost_T),
        max_ratio=maximum(ratio_T),
    )
    return losses_T.sum() / num_tokens, stats


def shared(terms_T: Tensor, share_T: Tensor | None) -> Tensor:
    return terms_T if share_T is None else terms_T * share_T


def actor_loss(
    logp_T: Tensor, entropy_T: Tensor, targets: ActorTargets, surrogate: Surrogate, ppo: PPOConfig, kl_coefficient: float,
    num_tokens: int,
) -> tuple[Tensor, PolicyStats]:  # fmt: skip
    """Surrogate + KL term (`kl.mode: loss`) - entropy bonus, with the same token weights in all three."""
    loss, stats = policy_loss(logp_T, targets, surrogate, num_tokens)
    if targets.reference_logp_T is not None:
        kl_T = kl_per_token(logp_T, targets.reference_logp_T, ppo.kl.formula)
        stats = replace(stats, kl=total(kl_T))
        if ppo.kl.mode == "loss":
            if ppo.kl.corrected:  # actor / old gives the KL's own gradient (arXiv 2506.09477, 2512.21852)
                kl_T = kl_T * (logp_T - targets.old_logp_T).exp()
            loss = loss + kl_coefficient * shared(kl_T, targets.share_T).sum() / num_tokens
    if ppo.entropy_coefficient > 0:
        loss = loss - ppo.entropy_coefficient * (shared(entropy_T, targets.share_T).sum() / num_tokens)
    return loss, replace(stats, entropy=total(entropy_T))


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, value_clip: float, num_tokens: int
) -> tuple[Tensor, ValueStats]:
    """Half the larger squared error, of the value or the value clamped to old +- `value_clip` (0: not clamped)."""
    error_T = (values_T - returns_T).square()
    losses_T = 0.5 * error_T
    lost_T = torch.zeros_like(values_T, dtype=torch.bool)
    if value_clip > 0:
        moved_T = values_T - old_values_T
        held_T = (old_values_T + moved_T.clamp(-value_clip, value_clip) - returns_T).square()
        lost_T = (moved_T.abs() > value_clip) & (held_T > error_T)
        losses_T = 0.5 * torch.maximum(error_T, held_T)
    stats = ValueStats(
        num_tokens=count(values_T),
        loss=total(losses_T),
        clipped=total(lost_T),
        squared_error=total(error_T),
        value=total(values_T),
        target=total(returns_T),
    )
    return losses_T.sum() / num_tokens, stats


POLICY_RATIOS = {
    "actor_loss": ("loss", "num_tokens"), "clip_fraction": ("clipped", "num_tokens"),
    "lost_gradient_fresh": ("fresh_lost", "fresh_gradient"), "lost_gradient_stale": ("stale_lost", "stale_gradient"),
    "approx_kl": ("approx_kl", "num_tokens"), "ratio_mean": ("ratio", "num_tokens"),
    "importance_weight_mean": ("weight", "num_tokens"), "masked_fraction": ("masked", "num_tokens"),
    "entropy": ("entropy", "num_tokens"),
}  # fmt: skip
"""Figures that are ratios of two sums of `PolicyStats`."""
POLICY_FIGURES = (*POLICY_RATIOS, "ratio_max")
BOUND_FIGURES = ("clip_fraction", "lost_gradient_fresh", "lost_gradient_stale")
"""Figures of the ratio's bounds, which a custom loss lacks."""


def policy_figures(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums = {name: sum(report[name] for report in reports) for names in POLICY_RATIOS.values() for name in names}
    figures = {name: sums[part] / (sums[whole] or 1.0) for name, (part, whole) in POLICY_RATIOS.items()}
    return figures | {"ratio_max": max(report["max_ratio"] for report in reports)}
