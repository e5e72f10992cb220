"""Online DPO (arXiv 2402.04792) on each group's best and worst response; groups of equal scores weigh 0.

T: response tokens of a micro-batch, B: responses, P: pairs, R: the 2P rows of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.algorithms.packed import TokenStats, count, last_tokens, row_sums, total
from oppo_megatron.algorithms.preference_losses import pair_columns
from oppo_megatron.config.supervised import DPOLossConfig

PAIR_FIGURES = (
    "actor_loss", "pair_accuracy", "pair_margin", "implicit_reward_chosen", "implicit_reward_rejected", "entropy",
)  # fmt: skip


@dataclass(frozen=True)
class PairStats(TokenStats):
    """Sums over tokens (`entropy`) and pairs (all others)."""

    entropy: Tensor
    pairs: Tensor
    loss: Tensor
    accuracy: Tensor
    margin: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor


def rows_of_pairs(signs_B: Tensor, group_size: int) -> list[list[int]]:
    """Each group's rows by sign (1: best, -1: worst), or its first two."""
    found = []
    for first, signs in zip(range(0, signs_B.numel(), group_size), signs_B.view(-1, group_size).tolist(), strict=True):
        places = [place for place, sign in enumerate(signs) if sign] or [0, 1]
        found.append([first + place for place in places[:2]])  # all signs of a group with a NaN are NaN
    return found


def pair_weights(num_tokens: int, counted_N: Sequence[bool]) -> list[float]:
    """Row weights, 1 / pairs in units of 1/T; 0 without a pair."""
    pairs = sum(counted_N) / 2
    return [num_tokens / pairs if counted else 0.0 for counted in counted_N]


def pair_loss(
    logp_T: Tensor, entropy_T: Tensor, targets: ActorTargets, rule: DPOLossConfig, num_tokens: int, noise: float
) -> tuple[Tensor, PairStats]:
    """Share of the minibatch's mean loss; a pair's rows are neighbours, with `pair_weights`; the better's advantages > 0."""
    assert targets.lengths_R is not None and targets.share_T is not None and targets.reference_logp_T is not None
    lengths_R = targets.lengths_R
    ends_R = last_tokens(lengths_R)
    first_P, _ = targets.advantages_T[ends_R].view(-1, 2).unbind(-1)
    weight_P, _ = targets.share_T[ends_R].view(-1, 2).unbind(-1)
    weight_P = weight_P * first_P.abs()  # unchanged, or NaN if the scores were NaN
    logp_R, reference_R = (row_sums(x_T.double(), lengths_R) for x_T in (logp_T, targets.reference_logp_T))
    ordered = []
    for x_R in (logp_R, reference_R, lengths_R.double()):
        x_P2 = x_R.view(-1, 2)
        ordered.append(torch.where((first_P < 0)[:, None], x_P2.flip(-1), x_P2).flatten())  # better, worse
    columns = pair_columns(ordered[0], ordered[1], ordered[2], rule, noise)
    loss = (columns["loss"] * weight_P).sum() / num_tokens
    counted_P = (weight_P > 0).double()
    stats = PairStats(
        num_tokens=count(logp_T),
        entropy=total(entropy_T),
        pairs=total(counted_P),
        **{name: total(each * counted_P) for name, each in columns.items()},
    )
    return loss.to(logp_T.dtype), stats


def pair_figures(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums = {name: sum(report[name] for report in reports) for name in reports[0] if name in PairStats.__dataclass_fields__}
    pairs = max(1.0, sums["pairs"])
    means = (sums[name] / pairs for name in ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected"))
    return dict(zip(PAIR_FIGURES, (*means, sums["entropy"] / sums["num_tokens"]), strict=True))
