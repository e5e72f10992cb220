"""A user's advantages and loss (docs/extending.md).

T: packed response tokens of the global batch, B: responses in G groups of neighbours (one prompt each), L: tokens of a response.
Numbers are float32; token ids, versions and lengths int64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import row_sums, to_tokens
from oppo_megatron.plugins import Plugin

PER_RESPONSE = ("score", "truncated", "group")
FINITE = "divide by nothing that may be 0, clamp exponents, and take no root or power of 0"


@dataclass(frozen=True)
class AdvantageInputs:
    """A scored global batch, the same on every rank.  None: the run has no such role."""

    tokens_T: Tensor
    old_logp_T: Tensor  # at sampling
    reference_logp_T: Tensor | None
    versions_T: Tensor  # the policy version that sampled each token; an update of the actor adds 1
    values_T: Tensor | None
    rewards_T: Tensor  # score at the last token, step rewards at their steps, less the KL with `kl.mode: penalty`
    scores_B: Tensor  # clipped, normalised and replaced as `ppo` says, less the KL with `kl.mode: score`
    lengths_B: Tensor
    truncated_B: Tensor  # bool: cut at the limit
    groups_B: Tensor  # index of each response's group, from 0
    group_size: int
    greedy_scores_G: Tensor | None = None  # of the greedy responses (`baseline: greedy`)

    def sum_tokens(self, x_T: Tensor) -> Tensor:
        """Return the sum over each response, [B]."""
        return row_sums(x_T, self.lengths_B)

    def to_tokens(self, x_B: Tensor) -> Tensor:
        """Repeat each response's number for its tokens, [T]."""
        return to_tokens(x_B, self.lengths_B, self.rewards_T.numel())


@dataclass(frozen=True)
class LossInputs:
    """One response of a batch, with log-probs of its tokens under the weights being trained."""

    logp_L: Tensor  # the only field with a gradient
    old_logp_L: Tensor  # base of the ratio; with `ppo.staleness: decoupled` under the step's first weights
    behaviour_logp_L: Tensor  # at sampling
    advantages_L: Tensor
    tokens_L: Tensor
    versions_L: Tensor
    score: Tensor  # [], before clipping
    truncated: Tensor  # [], bool: cut at the limit
    group: Tensor  # [], int64: index of its group in the batch
    num_tokens: int  # response tokens of the minibatch, on all ranks
    batch_size: int  # responses of the global batch
    group_size: int
    reference_logp_L: Tensor | None = None
    values_L: Tensor | None = None  # the critic's, before the update


@dataclass(frozen=True)
class CustomAdvantage:
    """`algorithm.advantage`: returns compared scores [B] or advantages [T]."""

    plugin: Plugin

    def __call__(self, batch: AdvantageInputs) -> Tensor:
        plugin, before = self.plugin, _versions(batch)
        found, again = plugin(batch), plugin(batch)
        _require_untouched(plugin, batch, before)
        shapes = ((batch.scores_B.numel(),), (batch.rewards_T.numel(),))
        found = _tensor(plugin, found, shapes, f"one number per response {list(shapes[0])} or per token {list(shapes[1])}")
        _require_finite(plugin, found)
        if not torch.equal(found, again):
            raise plugin.refuse(
                "returned two results for the same batch", "make it deterministic: every rank calls it for itself"
            )
        return found.detach().to(batch.scores_B.dtype)


@dataclass(frozen=True)
class CustomLoss:
    """`algorithm.loss`: returns token losses [L], each of its own log-prob only, or their sum (or `mean`), []."""

    plugin: Plugin
    mean: bool  # with `reduction: sequence_mean`

    def losses(self, logp_T: Tensor, columns: Mapping[str, Tensor], lengths: Sequence[int], counts: Mapping[str, int]) -> Tensor:
        """Token losses, [T]; `columns` [T] and `counts` by names of `LossInputs`.  Raises PluginError."""
        parts = {name: x_T.split(list(lengths)) for name, x_T in columns.items()}
        found, foreign = [], []
        for row, logp_L in enumerate(logp_T.split(list(lengths))):
            given: dict[str, Any] = {n if n in PER_RESPONSE else f"{n}_L": x[row] for n, x in parts.items()}
            scalars: dict[str, Any] = {name: given[name][0] for name in PER_RESPONSE}
            response = LossInputs(logp_L, **(given | scalars | dict(counts)))
            before, length = _versions(response), len(logp_L)
            loss = self.plugin(response)
            _require_untouched(self.plugin, response, before)
            loss = _tensor(self.plugin, loss, ((), (length,)), f"a loss [] or one per token [{length}]")
            if torch.is_grad_enabled() and not loss.requires_grad:
                remedy = "compute it from response.logp_L, and do not detach it"
                raise self.plugin.refuse("returned a loss without gradient", remedy)
            loss = loss.to(logp_L.dtype)
            if loss.dim() == 0:
                loss = loss.expand(length) / (1 if self.mean else length)
            elif loss.requires_grad:  # do losses of even tokens depend on log-probs of odd ones?
                (gradient_L,) = torch.autograd.grad(loss[::2].sum(), logp_L, retain_graph=True, allow_unused=True)
                if gradient_L is not None:
                    foreign.append(gradient_L[1::2].abs().sum() + 0 * gradient_L.sum())  # NaN if any is not finite
            found.append(loss)
        losses_T = torch.cat([logp_T[:0], *found])
        _require_finite(self.plugin, losses_T)
        found_elsewhere = float(torch.stack(foreign).sum()) if foreign else 0.0
        if math.isnan(found_elsewhere):
            raise self.plugin.refuse("returned a loss whose gradient is NaN or infinite", FINITE)
        if found_elsewhere:
            raise self.plugin.refuse(
                "returned a loss per token that depends on log-probs of other tokens",
                "return one number [] for the response: a sum over its tokens would count that dependence once per token",
            )
        return losses_T


def _versions(inputs: AdvantageInputs | LossInputs) -> list[int]:
    return [x._version for field in fields(inputs) if isinstance(x := getattr(inputs, field.name), Tensor)]


def _require_untouched(plugin: Plugin, inputs: AdvantageInputs | LossInputs, before: list[int]) -> None:
    if _versions(inputs) != before:
        names = [field.name for field in fields(inputs) if isinstance(getattr(inputs, field.name), Tensor)]
        changed = [name for name, was, now in zip(names, before, _versions(inputs), strict=True) if was != now]
        raise plugin.refuse(f"changed its input {changed[0]} in place", "work on a copy (x.clone())")


def _tensor(plugin: Plugin, found: Any, shapes: tuple[tuple[int, ...], ...], rule: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise plugin.refuse(f"returned a {type(found).__name__}", f"return a tensor: {rule}")
    if tuple(found.shape) not in shapes or not found.is_floating_point():
        raise plugin.refuse(f"returned {str(found.dtype).removeprefix('torch.')} {list(found.shape)}", f"return floats: {rule}")
    return found


def _require_finite(plugin: Plugin, x: Tensor) -> None:
    bad = (~x.detach().isfinite()).nonzero().flatten()
    if bad.numel():
        place = int(bad[0])
        raise plugin.refuse(
            f"returned {float(x.detach()[place])} at index {place} ({bad.numel()} of {x.numel()} numbers are not finite)", FINITE
        )
