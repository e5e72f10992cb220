"""Random batches, as rows or padded matrices (B rows, L tokens of the longest), and what is compared with the oracles on them:
the replay's formulas and the product's functions are the same to rounding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from oppo_megatron.algorithms import advantages
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import KLConfig, PPOConfig
from tests.replay import formulas
from tests.replay.formulas import Batch, Rows
from tests.replay.recipe import Recipe

LIMIT = 12
BATCHES = 50
TOLERANCE = 1e-6
"""Absolute, and relative to a number above 1."""


@dataclass(frozen=True)
class Sample:
    """A batch, the policy's log-probs (with gradient), and `proximal` ones at the step's start (`batch.old`: the behaviour's)."""

    batch: Batch
    new: list[Tensor]
    proximal: list[Tensor]
    group_size: int

    @property
    def lengths(self) -> list[int]:
        return self.batch.lengths


def samples(spread: float = 0.4, grouped: bool = True, count: int = BATCHES) -> Iterator[Sample]:
    """Batches with ties, one-token and cut rows, several versions; `spread`: deviation of a log-ratio."""
    for seed in range(count):
        yield sample(seed, spread, grouped)


def sample(seed: int, spread: float, grouped: bool) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    size = int(torch.randint(2, 6, (), generator=draw)) if grouped else 1
    groups = int(torch.randint(2, 5, (), generator=draw)) if grouped else 8
    rows = groups * size
    lengths = torch.randint(1, LIMIT + 1, (rows,), generator=draw)
    lengths[int(torch.randint(rows, (), generator=draw))] = 1
    lengths[int(torch.randint(rows, (), generator=draw))] = LIMIT
    # Quarters: their sums are exact, so that a group of equal rewards has the deviation 0 in every implementation.
    scores = torch.randint(-4, 5, (rows,), generator=draw) / 4
    if grouped:
        scores[:size] = scores[0]
    new, proximal, old, reference, values = [], [], [], [], []
    for length in lengths.tolist():
        noise = torch.randn(5, length, generator=draw)
        begin = -noise[0].abs() - 0.1
        stale = torch.arange(length) < int(torch.randint(length + 1, (), generator=draw))
        proximal.append(begin)
        old.append(begin + spread * noise[1] * stale)
        new.append((begin + spread * noise[2]).requires_grad_())
        reference.append(begin + 0.5 * noise[3])
        values.append(noise[4])
    of_greedy = (torch.randint(-4, 5, (groups,), generator=draw) / 4).tolist()
    of_rows, cut = [row // size for row in range(rows)], [length == LIMIT for length in lengths.tolist()]
    greedy_rows = {prompt: (score, False) for prompt, score in enumerate(of_greedy)}
    batch = Batch(scores, of_rows, cut, old, reference, values, greedy=greedy_rows)
    return Sample(batch, new, proximal, size)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[B, L], zeros behind each row."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def mask_of(rows: Sequence[Tensor]) -> Tensor:
    return padded([torch.ones_like(row) for row in rows]).detach()


def rows_of(matrix: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    if matrix.dim() == 1:
        return [number.expand(len(row)) for number, row in zip(matrix, like, strict=True)]
    return [row[: len(each)] for row, each in zip(matrix, like, strict=True)]


def gradients(loss: Tensor, rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(torch.autograd.grad(loss, list(rows)))


@dataclass(frozen=True)
class Implementation:
    """`advantages` of each token and the `loss` of a minibatch by one implementation; `has`: it can make the recipe."""

    name: str
    has: Callable[[Recipe], bool]
    advantages: Callable[[Batch, Recipe], Rows]
    loss: Callable[[Rows, Rows, Rows | None, Rows, Batch, Recipe], Tensor]


def _replay_advantages(batch: Batch, recipe: Recipe) -> Rows:
    greedy = {prompt: score for prompt, (score, _) in batch.greedy.items()}
    return formulas.advantages_of(batch, batch.scores_B, greedy, recipe, recipe.kl_coefficient)[0]


def _replay_loss(new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe) -> Tensor:
    nothing = [torch.zeros_like(row) for row in new]
    return formulas.actor_loss(
        new, nothing, old, importance, advantages, batch.reference, batch.groups, recipe, recipe.kl_coefficient
    )


def _product_has(recipe: Recipe) -> bool:
    """True but for a KL whose gradient is another's: d times that of the log-prob, with the estimate for its value."""
    return recipe.kl_gradient != "reverse"


def _algorithm(recipe: Recipe, batch: Batch) -> Algorithm:
    choices = AlgorithmConfig(
        preset="ppo" if recipe.baseline == "critic" else "grpo",
        **{name: getattr(recipe, name) for name in ("baseline", "scale", "ratio", "objective", "reduction")},
    )
    estimator = f"{recipe.estimator}+" if recipe.kl_gradient == "ratio" else recipe.estimator
    ppo = PPOConfig(
        gamma=recipe.gamma, gae_lambda=recipe.gae_lambda, clip=recipe.clip_low,
        clip_high=recipe.cap - 1 if choices.objective == "cispo" else recipe.clip_high, dual_clip=recipe.dual_clip,
        kl=KLConfig(mode=recipe.kl, estimator=estimator, coefficient=recipe.kl_coefficient),
    )  # fmt: skip
    return Algorithm(choices, ppo, group_size=batch.groups.count(batch.groups[0]), longest=recipe.longest)


def _product_advantages(batch: Batch, recipe: Recipe) -> Rows:
    algorithm = _algorithm(recipe, batch)
    scored = ScoredBatch(
        behaviour_logp_T=torch.cat(batch.old), reference_logp_T=None if recipe.kl == "none" else torch.cat(batch.reference),
        values_T=None if recipe.baseline != "critic" or batch.values is None else torch.cat(batch.values),
        scores_B=batch.scores_B, lengths_B=batch.lengths, truncated_B=torch.tensor(batch.cut), group_size=algorithm.group_size,
        greedy=_greedy(batch) if recipe.baseline == "greedy" else None,
    )  # fmt: skip
    # What is added to a deviation differs from one implementation to the next (ours is TRL's).
    with mock.patch.object(advantages, "DEVIATION_EPS", recipe.std_eps):
        return algorithm.experience(scored, recipe.kl_coefficient).advantages_T.split(batch.lengths)


def _greedy(batch: Batch) -> GreedyRows:
    scores, cut = zip(*(batch.greedy[prompt] for prompt in dict.fromkeys(batch.groups)), strict=True)
    return GreedyRows(torch.tensor(scores), torch.ones(len(scores), dtype=torch.int64), torch.tensor(cut))


def _product_loss(new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe) -> Tensor:
    algorithm, new_T = _algorithm(recipe, batch), torch.cat(new)
    weights = [torch.full((n,), w) for n, w in zip(batch.lengths, algorithm.row_weights(batch.lengths), strict=True)]
    targets = ActorTargets(
        old_logp_T=torch.cat(old), advantages_T=torch.cat(advantages),
        reference_logp_T=None if recipe.kl == "none" else torch.cat(batch.reference),
        weight_T=None if importance is None else torch.cat(importance), share_T=torch.cat(weights),
        lengths_R=torch.tensor(batch.lengths),
    )  # fmt: skip
    loss, _ = algorithm.actor_loss(new_T, torch.zeros_like(new_T), targets, recipe.kl_coefficient, new_T.numel())
    return loss


REPLAY = Implementation("replay", lambda recipe: True, _replay_advantages, _replay_loss)
PRODUCT = Implementation("oppo_megatron", _product_has, _product_advantages, _product_loss)
IMPLEMENTATIONS = (REPLAY, PRODUCT)


def cases(recipes: dict[str, Recipe]) -> pytest.MarkDecorator:
    found = [
        pytest.param(implementation, name, id=f"{implementation.name}-{name}")
        for name, recipe in recipes.items()
        for implementation in IMPLEMENTATIONS
        if implementation.has(recipe)
    ]
    return pytest.mark.parametrize(("ours", "name"), found)


def advantages_for(implementation: Implementation, sample: Sample, recipe: Recipe) -> list[Tensor]:
    return [row.detach() for row in implementation.advantages(sample.batch, recipe)]


def assert_close(ours: Tensor, theirs: Tensor, **about: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{about}: {text}")


def assert_rows_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], **about: Any) -> None:
    assert_close(torch.cat(list(ours)), torch.cat(list(theirs)), **about)


def assert_same_loss(ours: Tensor, theirs: Tensor, tokens: Rows, **about: Any) -> None:
    assert_close(ours.detach(), theirs.detach(), **about)
    assert_close(gradients(ours, tokens), gradients(theirs, tokens), **about)
