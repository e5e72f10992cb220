"""Turns scored rollouts into the tensors that the PPO update trains on.

Legend: T all response tokens of the GLOBAL batch (packed, see `packing`), B rows (responses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments, clip_scores, token_rewards, whiten
from oppo_megatron.algorithms.kl import kl_per_token
from oppo_megatron.algorithms.packed import Lengths, last_tokens, lengths_like
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.errors import NumericsError, RewardError


@dataclass(frozen=True)
class ScoredBatch:
    """A finished batch with all that the scorers said of it.

    `behaviour_logp_T` are the log-probs recorded at sampling, `truncated_B` marks responses cut at the limit (bool);
    `values_T` is None where no critic is trained.  `step_rewards_T`: the part of the scores that is earned at the ends of
    steps, there; 0 elsewhere, None where the scores are of whole responses.
    """

    behaviour_logp_T: Tensor
    reference_logp_T: Tensor
    values_T: Tensor | None
    scores_B: Tensor
    lengths_B: Lengths
    truncated_B: Tensor
    step_rewards_T: Tensor | None = None


@dataclass(frozen=True)
class ExperienceStats:
    """Summary of a batch.  Standard deviations are of the population (one row has 0); None: a figure of a critic's values."""

    score_mean: float  # scores as the reward gave them, before clipping
    score_std: float
    shaped_score_mean: float  # clipped, of cut responses by `truncated_score` and `missing_eos_penalty`; not normalised
    reward_mean: float  # per response: what GAE sees, KL penalty included
    kl_mean: float  # per response, nats
    value_mean: float | None  # per token
    return_mean: float  # per token
    advantage_mean: float  # per token, before whitening
    advantage_std: float
    explained_variance: (
        float | None
    )  # 1 - var(returns - values) / var(returns); 0 where returns vary by no more than rounding

    def figures(self) -> dict[str, float]:
        """Those that there are, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Experience:
    """The tensors that the update trains on.  `kl_T` is the sampling policy's KL, whether or not it entered the rewards."""

    advantages_T: Tensor
    returns_T: Tensor
    old_logp_T: Tensor
    reference_logp_T: Tensor
    old_values_T: Tensor | None
    kl_T: Tensor
    rewards_T: Tensor
    lengths_B: Tensor
    scores: Moments  # of this batch's, clipped: what a running normalisation remembers
    stats: ExperienceStats


Estimator = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""(rewards_T, values_T, lengths_B) -> advantages before whitening and returns, both [T]."""


def build_experience(
    scored: ScoredBatch,
    ppo: PPOConfig,
    kl_coefficient: float,
    estimator: Estimator,
    check: bool = True,
    seen: Moments = NOTHING_SEEN,
) -> Experience:
    """Rewards, advantages and returns (by `estimator`) of the whole global batch, without gradient.

    Scores are clipped first, then normalised (`seen`: those of all batches trained before); `truncated_score` and
    `missing_eos_penalty` then stand as the user wrote them.  The KL enters the rewards only with `kl.mode: penalty`.
    Raises RewardError for a score, NumericsError for any other quantity that is not finite, unless `check` is false: then
    what follows from such a quantity is not finite either.
    """
    lengths_B = lengths_like(scored.behaviour_logp_T, scored.lengths_B)
    if check:
        _check_inputs(scored, lengths_B)
    with torch.no_grad():
        kl_T = kl_per_token(scored.behaviour_logp_T, scored.reference_logp_T, ppo.kl.estimator)
        if check:
            _check_tokens("KL to the reference", kl_T, lengths_B)
        scores_B, shaped_B, moments = _trained_scores(scored, ppo, seen)
        penalty = kl_coefficient if ppo.kl.mode == "penalty" else 0.0
        rewards_T = token_rewards(scores_B, kl_T, lengths_B, penalty, scored.step_rewards_T)
        advantages_T, returns_T = estimator(rewards_T, scored.values_T, lengths_B)
        if check:
            _check_tokens("advantage", advantages_T, lengths_B)
        return Experience(
            advantages_T=whiten(advantages_T) if ppo.whiten_advantages else advantages_T,
            returns_T=returns_T,
            old_logp_T=scored.behaviour_logp_T.detach(),
            reference_logp_T=scored.reference_logp_T.detach(),
            old_values_T=None if scored.values_T is None else scored.values_T.detach(),
            kl_T=kl_T,
            rewards_T=rewards_T,
            lengths_B=lengths_B,
            scores=moments,
            stats=_summarise(scored, shaped_B, kl_T, rewards_T, advantages_T, returns_T),
        )


def _trained_scores(scored: ScoredBatch, ppo: PPOConfig, seen: Moments) -> tuple[Tensor, Tensor, Moments]:
    """Scores as they are trained on; these without a normalisation; and the moments of this batch's, clipped."""
    clipped_B = clip_scores(scored.scores_B, ppo.reward_clip)
    moments = Moments.of(clipped_B)
    normalised_B = _normalised(clipped_B, moments, seen, ppo)
    return _shaped(normalised_B, scored.truncated_B, ppo), _shaped(clipped_B, scored.truncated_B, ppo), moments


def _shaped(scores_B: Tensor, truncated_B: Tensor, ppo: PPOConfig) -> Tensor:
    """Scores, those of responses that were cut at the limit as the settings want them."""
    if ppo.truncated_score is not None:
        scores_B = scores_B.masked_fill(truncated_B, ppo.truncated_score)
    return scores_B - ppo.missing_eos_penalty * truncated_B


def _normalised(scores_B: Tensor, moments: Moments, seen: Moments, ppo: PPOConfig) -> Tensor:
    if ppo.reward_normalization == "none":
        return scores_B
    return whiten(scores_B, moments if ppo.reward_normalization == "batch" else seen + moments)


def _summarise(
    scored: ScoredBatch, shaped_B: Tensor, kl_T: Tensor, rewards_T: Tensor, advantages_T: Tensor, returns_T: Tensor
) -> ExperienceStats:
    num_rows = scored.scores_B.numel()
    scores_B, advantages_T = scored.scores_B.double(), advantages_T.double()
    return ExperienceStats(
        score_mean=float(scores_B.mean()),
        score_std=float(scores_B.std(correction=0)),
        shaped_score_mean=float(shaped_B.double().mean()),
        reward_mean=float(rewards_T.double().sum()) / num_rows,
        kl_mean=float(kl_T.double().sum()) / num_rows,
        value_mean=None if scored.values_T is None else float(scored.values_T.double().mean()),
        return_mean=float(returns_T.double().mean()),
        advantage_mean=float(advantages_T.mean()),
        advantage_std=float(advantages_T.std(correction=0)),
        explained_variance=None if scored.values_T is None else _explained_variance(returns_T, scored.values_T),
    )


def _explained_variance(returns_T: Tensor, values_T: Tensor) -> float:
    epsilon = torch.finfo(returns_T.dtype).eps
    returns_T, values_T = returns_T.double(), values_T.double()
    rounding = 4 * epsilon * float(torch.maximum(returns_T.abs(), values_T.abs()).amax())
    return_variance = float(returns_T.var(correction=0))
    unexplained = float((returns_T - values_T).var(correction=0))
    return 1.0 - unexplained / return_variance if return_variance > rounding**2 else 0.0


def _check_inputs(scored: ScoredBatch, lengths_B: Tensor) -> None:
    num_rows = lengths_B.numel()
    assert scored.scores_B.shape == scored.truncated_B.shape == (num_rows,), (
        f"{num_rows} rows, but scores {scored.scores_B.shape} and truncated {scored.truncated_B.shape}"
    )
    bad_B = (~scored.scores_B.isfinite()).nonzero().flatten()
    if bad_B.numel():
        row = int(bad_B[0])
        raise RewardError(
            f"the score of row {row} is {float(scored.scores_B[row])} ({bad_B.numel()} of {num_rows} rows are not "
            "finite); a score must be a finite number; check the reward that gave it"
        )
    _check_tokens("behaviour log-prob", scored.behaviour_logp_T, lengths_B)
    _check_tokens("reference log-prob", scored.reference_logp_T, lengths_B)
    if scored.values_T is not None:
        _check_tokens("value", scored.values_T, lengths_B)


def _check_tokens(quantity: str, x_T: Tensor, lengths_B: Tensor) -> None:
    """Raises NumericsError for the first token of `x_T` that is not finite, with its row and response position."""
    assert x_T.shape == (int(lengths_B.sum()),), (
        f"{quantity}: shape {x_T.shape} for {int(lengths_B.sum())} packed tokens"
    )
    bad_T = (~x_T.isfinite()).nonzero().flatten()
    if not bad_T.numel():
        return
    token = int(bad_T[0])
    last_B = last_tokens(lengths_B)
    row = int(torch.searchsorted(last_B, token))
    position = token - int(last_B[row] + 1 - lengths_B[row])
    raise NumericsError(
        f"the {quantity} of row {row}, response token {position}, is {float(x_T[token])} ({bad_T.numel()} of "
        f"{x_T.numel()} tokens are not finite); it must be a finite number; check the weights and inputs of the model "
        "that gave it, or lower the learning rate if training has diverged"
    )
