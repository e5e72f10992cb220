"""Losses of preference training: DPO and its relatives on pairs, KTO on rows that are wanted or unwanted.

    ratio   log pi(answer | prompt) - log pi_ref(answer | prompt), summed over the answer's tokens, its EOS included
    margin  of a pair, m: the chosen answer's ratio - the rejected one's; with `average` each ratio is divided by its tokens

    sigmoid -log s(bm) (Rafailov et al. 2023, eq. 7); smoothed -(1-e) log s(bm) - e log s(-bm) (Mitchell 2023)
    robust  [-(1-e) log s(bm) + e log s(-bm)] / (1-2e) (Chowdhury et al. 2024)
    hinge   max(0, 1 - bm) (Zhao et al. 2023)             ipo     (m - 1/(2b))^2 (Azar et al. 2023, eq. 17)
    kto     wanted 1 - s(b(ratio - z0)), unwanted 1 - s(b(z0 - ratio)) (Ethayarajh et al. 2024, eq. 7)
    apo_zero_unpaired  the same with z0 = 0 (D'Oosterlinck et al. 2024)

Sums are in double precision.  R: answer tokens of a micro-batch, S: its sequences (chosen, rejected, chosen, ...), P: pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oppo_megatron.algorithms.decode_gap import token_noise
from oppo_megatron.algorithms.packed import count, right_share, total
from oppo_megatron.config.supervised import DPOLossConfig

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
    logp_S: Tensor,
    reference_S: Tensor,
    counts_S: Tensor,
    sign_S: Tensor,
    rule: DPOLossConfig,
    point: float,
    noise: float = FLOAT32,
) -> dict[str, Tensor]:
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
