"""The tensors of an update, from scored rollouts.  T: response tokens of the GLOBAL batch, B: responses, G: prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments, compared, equal_groups, gae, token_rewards, whiten
from oppo_megatron.algorithms.custom import AdvantageInputs, CustomAdvantage
from oppo_megatron.algorithms.losses import kl_per_token
from oppo_megatron.algorithms.packed import Lengths, last_tokens, lengths_like, row_sums
from oppo_megatron.algorithms.supervised_losses import rows_of_pairs
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.errors import NumericsError, RewardError


@dataclass(frozen=True)
class GreedyRows:
    """A greedy response per prompt, outside the batch."""

    scores_G: Tensor
    lengths_G: Tensor
    truncated_G: Tensor

    def to(self, device: torch.device) -> GreedyRows:
        return GreedyRows(self.scores_G.to(device), self.lengths_G.to(device), self.truncated_G.to(device))


@dataclass(frozen=True)
class ScoredBatch:
    """A batch; responses to one prompt are neighbours."""

    behaviour_logp_T: Tensor  # recorded at sampling
    reference_logp_T: Tensor | None  # None without a reference
    values_T: Tensor | None  # None without a critic
    scores_B: Tensor
    lengths_B: Lengths
    truncated_B: Tensor  # bool: cut at the limit
    group_size: int = 1
    step_rewards_T: Tensor | None = None  # parts of the scores, earned at the ends of steps; 0 at other tokens
    greedy: GreedyRows | None = None  # if they are the baseline
    tokens_T: Tensor | None = None  # ids, for custom functions, like `versions_T`
    versions_T: Tensor | None = None  # the policy version that sampled each token

    @property
    def all_scores(self) -> Tensor:
        """Scores of rows, then greedy responses, [B + G]."""
        return self.scores_B if self.greedy is None else torch.cat([self.scores_B, self.greedy.scores_G])


PAIRED = ("pairs", "ties", "chosen_reward_mean", "rejected_reward_mean")
"""Fields of `ExperienceStats` that only pair losses fill."""


@dataclass(frozen=True)
class ExperienceStats:
    """Summary of a batch, with population deviations.  None: no such role."""

    score_mean: float  # before clipping
    score_std: float
    shaped_score_mean: float  # clipped and replaced in cut responses, not normalised
    reward_mean: float  # per response, KL penalty included
    kl_mean: float | None  # per response, nats
    value_mean: float | None  # per token
    return_mean: float  # per token
    advantage_mean: float  # per token, before whitening
    advantage_std: float
    explained_variance: float | None  # 1 - var(returns - values) / var(returns); 0 if returns vary by no more than rounding
    equal_groups: float | None = None  # share of groups whose scores are all the same
    pairs: int | None = None  # groups whose best response beats their worst, by the trained scores
    ties: int | None = None  # the other groups
    chosen_reward_mean: float | None = None  # of the pairs' better responses, before clipping
    rejected_reward_mean: float | None = None
    greedy_score_mean: float | None = None  # before clipping

    def figures(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Experience:
    """The tensors of an update.  `rewards_T` and `returns_T` are taken before a group's baseline is subtracted."""

    advantages_T: Tensor
    returns_T: Tensor
    old_logp_T: Tensor
    reference_logp_T: Tensor | None
    old_values_T: Tensor | None
    kl_T: Tensor | None  # of the sampling policy, also if the rewards do not include it
    rewards_T: Tensor
    lengths_B: Tensor
    scores: Moments  # of the clipped scores, for a running normalisation
    stats: ExperienceStats
    counted_B: Tensor | None = None  # True if the actor's loss counts a response; None: it counts all
    pairs: list[list[int]] | None = None  # rows of each group that a loss of pairs reads
    scores_B: Tensor | None = None  # before clipping


def build_experience(
    scored: ScoredBatch, choices: AlgorithmConfig, ppo: PPOConfig, kl_coefficient: float, check: bool = True,
    seen: Moments = NOTHING_SEEN, custom: CustomAdvantage | None = None,
) -> Experience:  # fmt: skip
    """With `check`, raises RewardError if a score is not finite, NumericsError if another input or result is not."""
    lengths_B = lengths_like(scored.behaviour_logp_T, scored.lengths_B)
    if check:
        _check_inputs(scored, lengths_B)
    with torch.no_grad():
        kl_T = None
        if scored.reference_logp_T is not None:
            kl_T = kl_per_token(scored.behaviour_logp_T, scored.reference_logp_T, ppo.kl.formula)
            if check:
                _check_tokens("KL to the reference", kl_T, lengths_B)
        scores = _trained_scores(scored, ppo, seen)
        rewards_T, compared_T, given_T = _rewards(scored, scores, kl_T, lengths_B, choices, ppo, kl_coefficient, custom)
        gae_lambda, values_T = ppo.gae_lambda, scored.values_T
        if not choices.critic:
            gae_lambda, values_T = 1.0, torch.zeros_like(rewards_T)
        assert values_T is not None, "advantages are taken against a critic's values"
        trained_T = rewards_T if compared_T is None else compared_T
        advantages_T, returns_T = gae(trained_T, values_T, lengths_B, ppo.gamma, gae_lambda)
        if compared_T is not None and not choices.critic:
            _, returns_T = gae(rewards_T, values_T, lengths_B, ppo.gamma, gae_lambda)
        if given_T is not None:
            advantages_T = given_T
        if check:
            _check_tokens("advantage", advantages_T, lengths_B)
        return Experience(
            advantages_T=whiten(advantages_T) if choices.scale == "whiten" and custom is None else advantages_T,
            returns_T=returns_T,
            old_logp_T=scored.behaviour_logp_T.detach(),
            reference_logp_T=_detached(scored.reference_logp_T),
            old_values_T=_detached(scored.values_T),
            kl_T=kl_T,
            rewards_T=rewards_T,
            lengths_B=lengths_B,
            scores_B=scored.scores_B,
            counted_B=~scored.truncated_B if ppo.mask_truncated else None,
            scores=scores.moments,
            stats=_summarise(scored, scores.shaped_B, kl_T, rewards_T, advantages_T, returns_T),
        )


def _rewards(
    scored: ScoredBatch, scores: _Scores, kl_T: Tensor | None, lengths_B: Tensor, choices: AlgorithmConfig, ppo: PPOConfig,
    kl_coefficient: float, custom: CustomAdvantage | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return token rewards, the same with compared scores (see `compared`) or None, custom advantages or None, [T] each."""
    scores_B = scores.trained_B
    if kl_T is not None and ppo.kl.mode == "score":
        scores_B = scores_B - kl_coefficient * row_sums(kl_T, lengths_B)
    penalty_T = kl_T if kl_T is not None and ppo.kl.mode == "penalty" else torch.zeros_like(scored.behaviour_logp_T)
    # Only which response of a pair is better matters, so steps earn nothing.
    steps_T = None if choices.pairs else scored.step_rewards_T
    rewards_T = token_rewards(scores_B, penalty_T, lengths_B, kl_coefficient, steps_T)
    if custom is not None:
        assert scored.tokens_T is not None and scored.versions_T is not None, "a custom function reads tokens and versions"
        groups_B = torch.arange(scores_B.numel(), device=scores_B.device) // scored.group_size
        batch = AdvantageInputs(
            tokens_T=scored.tokens_T, old_logp_T=scored.behaviour_logp_T.detach(), versions_T=scored.versions_T,
            reference_logp_T=_detached(scored.reference_logp_T), values_T=_detached(scored.values_T), rewards_T=rewards_T,
            scores_B=scores_B, lengths_B=lengths_B, truncated_B=scored.truncated_B, groups_B=groups_B,
            group_size=scored.group_size, greedy_scores_G=scores.greedy_G,
        )  # fmt: skip
        compared_B = custom(batch)
        if compared_B.shape != scores_B.shape:
            return rewards_T, None, compared_B
    elif choices.compares:
        compared_B = compared(scores_B, scored.group_size, choices.baseline, choices.scale, scores.greedy_G)
    else:
        return rewards_T, None, None
    # Rewards of steps are not divided by the scale: the last token gets the compared score less their sum.
    return rewards_T, token_rewards(compared_B, penalty_T, lengths_B, kl_coefficient, steps_T), None


def _detached(x_T: Tensor | None) -> Tensor | None:
    return None if x_T is None else x_T.detach()


class _Scores(NamedTuple):
    trained_B: Tensor
    shaped_B: Tensor  # the same without normalisation
    moments: Moments  # of the clipped scores
    greedy_G: Tensor | None  # scores of greedy responses, as a baseline


def _trained_scores(scored: ScoredBatch, ppo: PPOConfig, seen: Moments) -> _Scores:
    """Clip, normalise and shape (`truncated_score`) the scores; greedy scores use the moments of the trained ones."""

    def clipped(scores_B: Tensor) -> Tensor:
        return scores_B if ppo.reward_clip is None else scores_B.clamp(-ppo.reward_clip, ppo.reward_clip)

    def normalised(scores_B: Tensor) -> Tensor:
        if ppo.reward_normalization == "none":
            return scores_B
        return whiten(scores_B, moments if ppo.reward_normalization == "batch" else seen + moments)

    def shaped(scores_B: Tensor, truncated_B: Tensor) -> Tensor:
        return scores_B if ppo.truncated_score is None else scores_B.masked_fill(truncated_B, ppo.truncated_score)

    clipped_B, greedy, greedy_G = clipped(scored.scores_B), scored.greedy, None
    moments = Moments.of(clipped_B)
    if greedy is not None:
        greedy_G = shaped(normalised(clipped(greedy.scores_G)), greedy.truncated_G)
    trained_B, shaped_B = (shaped(x_B, scored.truncated_B) for x_B in (normalised(clipped_B), clipped_B))
    return _Scores(trained_B, shaped_B, moments, greedy_G)


def _summarise(
    scored: ScoredBatch, shaped_B: Tensor, kl_T: Tensor | None, rewards_T: Tensor, advantages_T: Tensor, returns_T: Tensor
) -> ExperienceStats:
    num_rows = scored.scores_B.numel()
    scores_B, advantages_T = scored.scores_B.double(), advantages_T.double()
    greedy_G = None if scored.greedy is None else scored.greedy.scores_G.double()
    grouped = scored.group_size > 1 or greedy_G is not None
    equal_G = equal_groups(scores_B, scored.group_size, greedy_G) if grouped else None
    return ExperienceStats(
        score_mean=float(scores_B.mean()),
        score_std=float(scores_B.std(correction=0)),
        shaped_score_mean=float(shaped_B.double().mean()),
        reward_mean=float(rewards_T.double().sum()) / num_rows,
        kl_mean=None if kl_T is None else float(kl_T.double().sum()) / num_rows,
        value_mean=None if scored.values_T is None else float(scored.values_T.double().mean()),
        return_mean=float(returns_T.double().mean()),
        advantage_mean=float(advantages_T.mean()),
        advantage_std=float(advantages_T.std(correction=0)),
        explained_variance=None if scored.values_T is None else _explained_variance(returns_T, scored.values_T),
        equal_groups=None if equal_G is None else float(equal_G.double().mean()),
        greedy_score_mean=None if greedy_G is None else float(greedy_G.mean()),
    )


def with_pairs(experience: Experience, scored: ScoredBatch, knows_kl: bool) -> Experience:
    """Add the pairs' rows (advantages 1 and -1) and figures; without `knows_kl` (another sampling temperature) no KL is kept."""
    signs_B, scores_B = experience.advantages_T[last_tokens(experience.lengths_B)], scored.scores_B.double()
    chosen, rejected = scores_B[signs_B > 0], scores_B[signs_B < 0]
    pairs = chosen.numel()
    means = (float(x.mean()) if pairs else None for x in (chosen, rejected))
    figures: dict[str, Any] = dict(zip(PAIRED, (pairs, signs_B.numel() // scored.group_size - pairs, *means), strict=True))
    if not knows_kl:
        experience, figures = replace(experience, kl_T=None), figures | {"kl_mean": None}
    rows = rows_of_pairs(signs_B, scored.group_size)
    return replace(experience, counted_B=signs_B != 0, pairs=rows, stats=replace(experience.stats, **figures))


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
    scores_N = scored.all_scores
    bad_N = (~scores_N.isfinite()).nonzero().flatten()
    if bad_N.numel():
        place = int(bad_N[0])
        row = f"row {place}" if place < num_rows else f"greedy row {place - num_rows}"
        raise RewardError(
            f"the score of {row} is {float(scores_N[place])} ({bad_N.numel()} of {scores_N.numel()} rows are not "
            "finite); a score must be a finite number; check the reward that gave it"
        )
    _check_tokens("behaviour log-prob", scored.behaviour_logp_T, lengths_B)
    _check_tokens("reference log-prob", scored.reference_logp_T, lengths_B)
    _check_tokens("value", scored.values_T, lengths_B)


def _check_tokens(quantity: str, x_T: Tensor | None, lengths_B: Tensor) -> None:
    if x_T is None:
        return
    assert x_T.shape == (int(lengths_B.sum()),), f"{quantity}: shape {x_T.shape} for {int(lengths_B.sum())} packed tokens"
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
