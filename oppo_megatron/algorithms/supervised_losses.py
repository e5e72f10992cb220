"""Losses of supervised training: next tokens (SFT), preferences and steps (reward models), preferences (DPO and others).

R: tokens (or rows of pairs), S: sequences (chosen, rejected, chosen, ...) and P: pairs of a micro-batch; T: response tokens.
`num_tokens` and `num_pairs` count the whole batch.  Statistics are sums over `count`.
DPO and its relatives take pairs, KTO takes rows that are wanted or unwanted; online DPO (arXiv 2402.04792) takes the best and
worst response of each group, and groups of equal scores weigh 0.

    ratio   log pi(answer | prompt) - log pi_ref(answer | prompt), summed over the answer's tokens, its EOS included
    margin  of a pair, m: the chosen answer's ratio - the rejected one's; with `average` each ratio is divided by its tokens

    sigmoid -log s(bm) (Rafailov et al. 2023, eq. 7); smoothed -(1-e) log s(bm) - e log s(-bm) (Mitchell 2023)
    robust  [-(1-e) log s(bm) + e log s(-bm)] / (1-2e) (Chowdhury et al. 2024)
    hinge   max(0, 1 - bm) (Zhao et al. 2023)             ipo     (m - 1/(2b))^2 (Azar et al. 2023, eq. 17)
    kto     wanted 1 - s(b(ratio - z0)), unwanted 1 - s(b(z0 - ratio)) (Ethayarajh et al. 2024, eq. 7)
    apo_zero_unpaired  the same with z0 = 0 (D'Oosterlinck et al. 2024)

Sums of preferences are in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.algorithms.packed import TokenStats, count, last_tokens, right_share, rounding, row_sums, token_noise, total
from oppo_megatron.config.supervised import DPOLossConfig


def next_token_loss(logp_R: Tensor, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats) of the completion tokens."""
    return -logp_R.sum() / num_tokens, {"count": count(logp_R), "loss": total(-logp_R)}


def preference_loss(scores_P2: Tensor, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry: mean -log sigmoid(chosen - rejected); column 0 has the chosen answers."""
    _, losses_P, right_P, margin_P = preference_table(scores_P2).unbind(-1)
    return losses_P.sum() / num_pairs, {
        "count": count(margin_P),
        "loss": total(losses_P),
        "accuracy": total(right_P),
        "margin": total(margin_P),
    }


def preference_table(scores_P2: Tensor) -> Tensor:
    """Return 1, loss, accuracy and margin of each pair, [P, 4]."""
    chosen_P, rejected_P = scores_P2.unbind(-1)
    margin_P = chosen_P - rejected_P
    right_P = right_share(margin_P, rounding(scores_P2) * scores_P2.abs().amax(-1)).to(margin_P.dtype)
    return torch.stack([torch.ones_like(margin_P), -logsigmoid(margin_P), right_P, margin_P], -1)


def means(stats: Mapping[str, float]) -> dict[str, float]:
    """Divide sums by `count`; {} for {} (an early pipeline stage)."""
    return {name: value / stats["count"] for name, value in stats.items() if name != "count"}


def step_loss(logits_R: Tensor, labels_R: Tensor, num_labels: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean binary cross-entropy (nats) of labels from 0 to 1."""
    _, losses_R, right_R = step_table(logits_R, labels_R).unbind(-1)
    return losses_R.sum() / num_labels, {"count": count(losses_R), "loss": total(losses_R), "accuracy": total(right_R)}


def step_table(logits_R: Tensor, labels_R: Tensor) -> Tensor:
    """Return 1, loss and accuracy of each label, [R, 3]."""
    noise = torch.full_like(logits_R, rounding(logits_R))  # of a logit of usual size, 1
    logits_R = logits_R.to(torch.promote_types(logits_R.dtype, torch.float32))
    losses_R = binary_cross_entropy_with_logits(logits_R, labels_R.to(logits_R.dtype), reduction="none")
    right_R = right_share(torch.where(labels_R > 0.5, logits_R, -logits_R), noise).to(logits_R.dtype)
    return torch.stack([torch.ones_like(losses_R), losses_R, right_R], -1)


def step_scores(logits_S: Tensor) -> Tensor:
    return logits_S.double().sigmoid()


def response_scores(
    scores_S: Tensor, counts: Sequence[int], how: Literal["last", "min", "sum", "potential"]
) -> tuple[Tensor, Tensor | None]:
    """Scores [B] of steps' scores (`counts` per response), and steps' shares [S] (None: no step rewards)."""
    rows = scores_S.split(list(counts))
    if how == "min":
        return torch.stack([row.amin() for row in rows]), None
    if how == "sum":
        return torch.stack([row.sum() for row in rows]), scores_S
    last_B = torch.stack([row[-1] for row in rows])
    return last_B, None if how == "last" else torch.cat([row.diff(prepend=row.new_zeros(1)) for row in rows])


FLOAT32 = token_noise("float32")


def sequence_sums(logp_R: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum of each sequence's `counts` rows, [S]."""
    return torch.stack([piece.sum() for piece in logp_R.double().split(list(counts))])


def pair_columns(
    logp_S: Tensor, reference_S: Tensor, counts_S: Tensor, rule: DPOLossConfig, noise: float = FLOAT32
) -> dict[str, Tensor]:
    """Each pair's `loss`, implicit rewards and their difference, [P]; `accuracy`: 1/2 within `noise` per token."""
    scale_S = 1.0 / counts_S if rule.average else torch.ones_like(reference_S)
    ratio_P2 = ((logp_S - reference_S) * scale_S).view(-1, 2)
    chosen_P, rejected_P = ratio_P2.unbind(-1)
    losses_P = margin_losses(chosen_P - rejected_P, rule)
    if rule.nll:
        mean_P, _ = (logp_S / counts_S).view(-1, 2).unbind(-1)
        losses_P = losses_P - rule.nll * mean_P
    with torch.no_grad():
        margin_P = rule.beta * (chosen_P - rejected_P)
        noise_P = rule.beta * noise * (counts_S * scale_S.square()).view(-1, 2).sum(-1).sqrt()
        return {
            "loss": losses_P,
            "accuracy": right_share(margin_P, noise_P),
            "margin": margin_P,
            "reward_chosen": rule.beta * chosen_P,
            "reward_rejected": rule.beta * rejected_P,
        }


def margin_losses(margin_P: Tensor, rule: DPOLossConfig) -> Tensor:
    """Loss per margin, [P], without `nll`."""
    scaled_P, flipped = rule.beta * margin_P, rule.label_smoothing
    if rule.loss == "hinge":
        return torch.relu(1 - scaled_P)
    if rule.loss == "ipo":
        return (margin_P - 1 / (2 * rule.beta)) ** 2
    right_P, wrong_P = -logsigmoid(scaled_P), -logsigmoid(-scaled_P)
    if rule.loss == "robust":
        return ((1 - flipped) * right_P - flipped * wrong_P) / (1 - 2 * flipped)
    return (1 - flipped) * right_P + flipped * wrong_P


def row_columns(
    logp_S: Tensor, reference_S: Tensor, counts_S: Tensor, sign_S: Tensor, rule: DPOLossConfig, point: float,
    noise: float = FLOAT32,
) -> dict[str, Tensor]:  # fmt: skip
    """Each row's `loss` and `margin`, its implicit reward's distance from z0 (`point`), [S].  `sign_S`: 1 wanted, -1 unwanted."""
    ratio_S = logp_S - reference_S
    margin_S = rule.beta * sign_S * (ratio_S - point)
    weight_S = torch.full_like(sign_S, rule.unwanted, dtype=torch.float64).masked_fill(sign_S > 0, rule.wanted)
    side_S = margin_S.detach()
    return {
        "loss": weight_S * torch.sigmoid(-margin_S),
        "accuracy": right_share(side_S, rule.beta * noise * counts_S.sqrt()),
        "margin": side_S,
        "reward": rule.beta * ratio_S.detach(),
        "reference_point": torch.full_like(side_S, point),
    }


def mean_loss(columns: Mapping[str, Tensor], num_rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Share of the mean over `num_rows`, and the micro-batch's sums."""
    share = columns["loss"].sum() / num_rows
    return share.float(), {"count": count(columns["loss"])} | {name: total(each) for name, each in columns.items()}


def table_of(columns: Mapping[str, Tensor], metrics: Sequence[str]) -> Tensor:
    """1 and the `metrics` of each row, [N, 1 + K]."""
    found = [columns[name].detach().double() for name in metrics]
    return torch.stack([torch.ones_like(found[0]), *found], -1)


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
