"""A user's advantages and loss (docs/extending.md).

T: packed response tokens of the global batch, B: responses in G groups of neighbours (one prompt each), L: tokens of a response.
Numbers are float32; token ids, versions and lengths int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import row_sums, to_tokens
from oppo_megatron.plugins import Plugin, said_of

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
        plugin = self.plugin
        before = _Content(plugin, {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)})
        found = plugin(batch)
        before.require_same()
        again = plugin(batch)
        shapes = ((batch.scores_B.numel(),), (batch.rewards_T.numel(),))
        found = _tensor(plugin, found, shapes, f"one number per response {list(shapes[0])} or per token {list(shapes[1])}")
        _require_finite(plugin, found)
        if not torch.equal(found, again):
            raise plugin.refuse("returned two results for the same batch", "make it deterministic: every rank calls it")
        return found.detach().to(batch.scores_B.dtype)


@dataclass(frozen=True)
class CustomLoss:
    """`algorithm.loss`: returns token losses [L], each depending on its own log-prob only, or their sum (`mean`: mean), []."""

    plugin: Plugin
    mean: bool  # with `reduction: sequence_mean`

    def losses(self, logp_T: Tensor, columns: Mapping[str, Tensor], lengths: Sequence[int], counts: Mapping[str, int]) -> Tensor:
        """Token losses, [T]; `columns` [T] and `counts` are named as in `LossInputs`, without `_L`.  Raises PluginError."""
        parts = {name: x_T.split(list(lengths)) for name, x_T in columns.items()}
        content = {n if n in PER_RESPONSE else f"{n}_L": x_T for n, x_T in {"logp": logp_T, **columns}.items()}
        before = _Content(self.plugin, content)
        found, foreign = [], []
        for row, logp_L in enumerate(logp_T.split(list(lengths))):
            given: dict[str, Any] = {n if n in PER_RESPONSE else f"{n}_L": x[row] for n, x in parts.items()}
            scalars: dict[str, Any] = {name: given[name][0] for name in PER_RESPONSE}
            length = len(logp_L)
            loss = self.plugin(LossInputs(logp_L, **(given | scalars | dict(counts))))
            before.require_unwritten()
            loss = _tensor(self.plugin, loss, ((), (length,)), f"a loss [] or one per token [{length}]")
            if torch.is_grad_enabled() and not loss.requires_grad:
                remedy = "compute it from response.logp_L, and do not detach it"
                raise self.plugin.refuse("returned a loss without gradient", remedy)
            loss = loss.to(logp_L.dtype)
            if loss.requires_grad:
                foreign.append(self._foreign(loss, logp_L))
            found.append(loss if loss.dim() else loss.expand(length) / (1 if self.mean else length))
        before.require_same()
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

    def _foreign(self, loss: Tensor, logp_L: Tensor) -> Tensor:
        """Number of log-probs that other tokens' losses depend on, []; NaN if a gradient is not finite.

        Losses are summed plain and weighted by powers of two: a log-prob of its own loss only has an exactly scaled gradient.
        """
        places_L = torch.arange(len(logp_L), device=logp_L.device)
        weights_L = (0.5 ** (places_L * 2654435761 // 2**20 % 4)).to(loss.dtype)
        sums = [loss.sum(), (loss * weights_L).sum()] if loss.dim() else [loss]
        try:
            gradients = [torch.autograd.grad(x, logp_L, retain_graph=True, allow_unused=True)[0] for x in sums]
        except (RuntimeError, ValueError) as error:
            fault = f"returned a loss without gradient ({said_of(error)})"
            raise self.plugin.refuse(fault, "compute it from response.logp_L, without changes in place") from error
        if any(gradient is None for gradient in gradients):
            raise self.plugin.refuse("returned a loss without gradient", "compute it from response.logp_L")
        plain_L, weighted_L = gradients[0], gradients[-1]
        scaled_L = plain_L * weights_L if loss.dim() else plain_L
        excess_L = (weighted_L - scaled_L).abs() > 1e-3 * scaled_L.abs() + 1e-30
        return excess_L.sum() + 0 * (plain_L.sum() + weighted_L.sum())


class _Content:
    """A user function's inputs, with copies to detect changes in place: torch counts them, except through `.data` and NumPy."""

    def __init__(self, plugin: Plugin, inputs: Mapping[str, Tensor]):
        self.plugin, self.inputs = plugin, inputs
        self.before = {name: (x._version, x.detach().clone()) for name, x in inputs.items()}

    def require_unwritten(self) -> None:
        self._refuse(name for name, x in self.inputs.items() if x._version != self.before[name][0])

    def require_same(self) -> None:
        self.require_unwritten()
        changed = {name: ((x == x) & (x != self.before[name][1])).any() for name, x in self.inputs.items()}
        self._refuse(compress(changed, torch.stack(list(changed.values())).tolist()))

    def _refuse(self, changed: Iterable[str]) -> None:
        for name in changed:
            raise self.plugin.refuse(f"changed its input {name} in place", "work on a copy (x.clone())")


def _tensor(plugin: Plugin, found: Any, shapes: tuple[tuple[int, ...], ...], rule: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise plugin.refuse(f"returned {type(found).__name__}", f"return a tensor: {rule}")
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
