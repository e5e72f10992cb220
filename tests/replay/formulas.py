"""The arithmetic of every recipe, row by row and token by token, from the papers' formulas; shares nothing with the product.
Legend: B rows of a batch; lists have one tensor per row, [tokens of the row]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.replay.recipe import Recipe

Rows = Sequence[Tensor]
WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class Batch:
    """The inputs of a step.

    `groups`: prompt of each row; `cut`: cut at the limit; `old`: log-probs at the draw; `values`: the critic's at the start;
    `greedy`: by prompt, score and cut of the greedy response; `token_rewards`: None if only the last one is rewarded."""

    scores_B: Tensor
    groups: Sequence[int]
    cut: Sequence[bool]
    old: Rows
    reference: Rows
    values: Rows | None = None
    token_rewards: Rows | None = None
    greedy: Mapping[int, tuple[float, bool]] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.old]


def kl_of(new: Tensor, reference: Tensor, estimator: str) -> Tensor:
    d = new - reference
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


def scores_for_training(batch: Batch, recipe: Recipe, seen: Tensor) -> tuple[Tensor, dict[int, float], Tensor]:
    """Scores clipped, normalised (greedy ones by the others' moments) and corrected for cuts; those `seen` next."""
    clipped_B = clipped(batch.scores_B, recipe)
    seen = torch.cat([seen, clipped_B.double()])
    over = seen if recipe.reward_normalization == "running" else clipped_B.double()
    greedy = {
        prompt: float(shaped(clipped(torch.tensor([score]), recipe), [cut], over, recipe)[0])
        for prompt, (score, cut) in batch.greedy.items()
    }
    return shaped(clipped_B, batch.cut, over, recipe), greedy, seen


def clipped(scores_B: Tensor, recipe: Recipe) -> Tensor:
    return scores_B if recipe.reward_clip is None else scores_B.clamp(-recipe.reward_clip, recipe.reward_clip)


def shaped(scores_B: Tensor, cut: Sequence[bool], over: Tensor, recipe: Recipe) -> Tensor:
    if recipe.reward_normalization != "none":
        scores_B = ((scores_B - over.mean()) / torch.sqrt(over.var(correction=0) + WHITEN_EPS)).float()
    cut_B = torch.tensor(cut)
    if recipe.truncated_score is None:
        return scores_B
    return torch.where(cut_B, torch.full_like(scores_B, recipe.truncated_score), scores_B)


def less_baseline(scores_B: Tensor, groups: Sequence[int], recipe: Recipe, greedy: Mapping[int, float]) -> Tensor:
    """r_i - b_i, [B]; exactly 0 in a group whose rewards are all equal."""
    if recipe.baseline == "best_worst":
        return best_and_worst(scores_B, groups)
    out_B = scores_B.clone()
    if recipe.baseline == "greedy":
        return scores_B - torch.tensor([greedy[group] for group in groups], dtype=scores_B.dtype)
    if recipe.baseline not in ("group_mean", "others"):
        return out_B
    for members in members_of(groups):
        inside = scores_B[members]
        for place, row in enumerate(members):
            if recipe.baseline == "group_mean":
                baseline = inside.mean()
            else:
                baseline = torch.cat([inside[:place], inside[place + 1 :]]).mean()
            out_B[row] = scores_B[row] - baseline
        if inside.max() == inside.min():
            out_B[members] = 0.0
    return out_B


def best_and_worst(scores_B: Tensor, groups: Sequence[int]) -> Tensor:
    """1 for a group's first best row, -1 for its first worst, [B]; 0 for others, and if all are equal."""
    out_B = torch.zeros_like(scores_B)
    for members in members_of(groups):
        best = max(members, key=lambda row: float(scores_B[row]))
        worst = min(members, key=lambda row: float(scores_B[row]))
        if scores_B[best] > scores_B[worst]:
            out_B[best], out_B[worst] = 1.0, -1.0
    return out_B


def scaled(advantages_B: Tensor, scores_B: Tensor, groups: Sequence[int], recipe: Recipe) -> Tensor:
    """Advantages of rows, [B], over the deviation that the recipe names; whitening over tokens comes later."""
    if recipe.scale == "group_std":
        out_B = torch.zeros_like(advantages_B)
        for members in members_of(groups):
            if scores_B[members].max() > scores_B[members].min():
                out_B[members] = advantages_B[members] / (scores_B[members].std() + recipe.std_eps)
        return out_B
    if recipe.scale == "batch_std":
        return advantages_B / (scores_B.std() + recipe.std_eps)
    if recipe.scale == "advantage_std":
        if advantages_B.max() == advantages_B.min():
            return torch.zeros_like(advantages_B)
        return (advantages_B - advantages_B.mean()) / (advantages_B.std() + recipe.std_eps)
    return advantages_B


def members_of(groups: Sequence[int]) -> list[list[int]]:
    return [[row for row, group in enumerate(groups) if group == each] for each in dict.fromkeys(groups)]


def advantages_of(
    batch: Batch, scores_B: Tensor, greedy: Mapping[int, float], recipe: Recipe, coefficient: float
) -> tuple[Rows, Rows]:
    """Advantages and returns of each token; `greedy`: scores of greedy responses, by prompt."""
    kl = [kl_of(old, reference, recipe.estimator) for old, reference in zip(batch.old, batch.reference, strict=True)]
    if recipe.kl == "score":
        scores_B = scores_B - coefficient * torch.stack([row.sum() for row in kl])
    row_B = scaled(less_baseline(scores_B, batch.groups, recipe, greedy), scores_B, batch.groups, recipe)
    advantages, returns = [], []
    for number, per_token in enumerate(kl):
        rewards = -coefficient * per_token if recipe.kl == "penalty" else torch.zeros_like(per_token)
        if batch.token_rewards is None:
            rewards[-1] += row_B[number]
        else:
            rewards = rewards + batch.token_rewards[number]
        if recipe.baseline == "critic":
            assert batch.values is not None
            found = gae(rewards, batch.values[number], recipe.gamma, recipe.gae_lambda)
            returns.append(found + batch.values[number])
        else:
            found = gae(rewards, torch.zeros_like(rewards), recipe.gamma, 1.0)
            returns.append(found)
        advantages.append(found)
    return (whitened(advantages) if recipe.scale == "whiten" else advantages), returns


def gae(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = r_t + gamma V_{t+1} - V_t + gamma lambda A_{t+1}, from the last token on."""
    out, later, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        value = float(values[t])
        later = float(rewards[t]) + gamma * next_value - value + gamma * gae_lambda * later
        out[t], next_value = later, value
    return torch.tensor(out, dtype=rewards.dtype)


def whitened(rows: Rows) -> Rows:
    flat = torch.cat(list(rows)).double()
    mean, deviation = flat.mean(), torch.sqrt(flat.var(correction=0) + WHITEN_EPS)
    return [((row - mean) / deviation).to(row.dtype) for row in rows]


def token_weights(lengths: Sequence[int], groups: Sequence[int], recipe: Recipe) -> list[float]:
    rows, tokens = len(lengths), sum(lengths)
    in_group = {group: sum(lengths[i] for i in range(rows) if groups[i] == group) for group in groups}
    return [
        {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (rows * length),
            "constant": 1 / (rows * recipe.longest),
            "group_token_mean": 1 / (len(in_group) * in_group[group]),
            "sequence_sum": 1 / rows,
        }[recipe.reduction]
        for length, group in zip(lengths, groups, strict=True)
    ]


def row_ratio(new: Tensor, old: Tensor, recipe: Recipe) -> Tensor:
    log = new - old
    if recipe.ratio == "token":
        return log.exp()
    if recipe.ratio == "sequence":
        return log.mean().exp().expand_as(new)
    if recipe.ratio == "sequence_token":
        return log.mean().exp().detach() * (new - new.detach()).exp()
    return log.sum().exp().expand_as(new)


def row_losses(new: Tensor, old: Tensor, advantages: Tensor, recipe: Recipe) -> Tensor:
    """The loss of each token of one row; a sequence's product stands for the row as a whole: its tokens share it."""
    ratio = row_ratio(new, old, recipe)
    if recipe.objective == "plain":
        losses = -advantages * new
    elif recipe.objective == "cispo":
        losses = -ratio.clamp(max=recipe.cap).detach() * advantages * new
    else:
        held = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
        losses = -torch.minimum(ratio * advantages, held * advantages)
        if recipe.dual_clip is not None:
            most = recipe.dual_clip * advantages.abs()
            losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    return losses / len(new) if recipe.ratio == "sequence_product" and recipe.objective == "clip" else losses


def kl_losses(new: Tensor, old: Tensor, reference: Tensor, recipe: Recipe) -> Tensor:
    value = kl_of(new, reference, recipe.estimator)
    if recipe.kl_gradient == "reverse":
        pull = (new - reference).detach() * new
        return value.detach() + pull - pull.detach()
    return value * (new - old).exp() if recipe.kl_gradient == "ratio" else value


def pair_loss(new: Rows, reference: Rows, signs: Sequence[float], groups: Sequence[int], recipe: Recipe) -> Tensor:
    """-log sigmoid of beta times the margin: of the log-ratios to the reference, better response less worse; mean over pairs."""
    losses = []
    for members in members_of(groups):
        better, worse = ([row for row in members if signs[row] == sign] for sign in (1, -1))
        if better and worse:
            ratios = [(new[row].double() - reference[row].double()).sum() for row in (better[0], worse[0])]
            losses.append(torch.log1p(torch.exp(-recipe.beta * (ratios[0] - ratios[1]))))
    return torch.stack(losses).mean().float() if losses else sum(row.sum() for row in new) * torch.zeros(())


def actor_loss(
    new: Rows, entropies: Rows, old: Rows, importance: Rows | None, advantages: Rows, reference: Rows, groups: Sequence[int],
    recipe: Recipe, coefficient: float,
) -> Tensor:  # fmt: skip
    """The loss of one minibatch.  `old` is what ratios are taken against, `importance` the weight of a stale token."""
    if recipe.objective == "dpo":
        return pair_loss(new, reference, [float(row[-1]) for row in advantages], groups, recipe)
    total = torch.zeros(())
    for row, weight in enumerate(token_weights([len(each) for each in new], groups, recipe)):
        losses = row_losses(new[row], old[row], advantages[row], recipe)
        if importance is not None:
            losses = losses * importance[row]
        if recipe.kl == "loss":
            losses = losses + coefficient * kl_losses(new[row], old[row], reference[row], recipe)
        total = total + weight * (losses - recipe.entropy_coefficient * entropies[row]).sum()
    return total


def critic_loss(new: Rows, old: Rows, returns: Rows, recipe: Recipe) -> Tensor:
    """Half the mean over tokens of the larger of two squared errors."""
    value, before, target = (torch.cat(list(rows)) for rows in (new, old, returns))
    errors = (value - target).square()
    if recipe.value_clip > 0:
        held = before + (value - before).clamp(-recipe.value_clip, recipe.value_clip)
        errors = torch.maximum(errors, (held - target).square())
    return errors.mean() / 2
