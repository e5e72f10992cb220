"""The vocabulary over tensor ranks; log-probs and entropy from hidden states, in float32, without all logits at once.

megatron's cross entropies read a global group or round gradients, and use more memory.
Legend: R rows, B a block of them, H hidden, V vocabulary shard or a slice of it, S slices, q = softmax(logits / temperature) over
the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.layout.activations import CACHED_NUMBERS, SLICE_NUMBERS, slice_width
from oppo_megatron.mcore.context import SequenceShare
from oppo_megatron.mcore.cpu import row_multiple


class VocabShards:
    """This rank's `rows` rows (the last may be padded); logits x become cap tanh(x / cap) (Gemma 2)."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, rows: int = 0, vocab_size: int | None = None, cap: float | None = None
    ):
        self.group, self.rows, self.vocab_size, self.cap = group, rows, vocab_size, cap
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.num_tokens = rows if vocab_size is None else min(rows, vocab_size - self.first)
        assert self.num_tokens > 0 or group is None, f"no token of {vocab_size} on rank {self.rank} of {self.size}"

    @property
    def first(self) -> int:
        return self.rank * self.rows

    def of_tokens(self, rows_RV: Tensor) -> Tensor:
        return rows_RV if self.num_tokens == self.rows else rows_RV[..., : self.num_tokens]

    def capped(self, logits_RV: Tensor) -> Tensor:
        """Cap in place."""
        return logits_RV if self.cap is None else logits_RV.div_(self.cap).tanh_().mul_(self.cap)

    def before_cap(self, grad_BV: Tensor, capped_BV: Tensor) -> Tensor:
        """Turn the gradient of capped logits into the logits' gradient, in place."""
        return grad_BV if self.cap is None else grad_BV.mul_(capped_BV.float().div_(self.cap).square_().neg_().add_(1))

    def filled_up(self, logits_RV: Tensor) -> Tensor:
        missing = self.rows - self.num_tokens
        return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing and self.size > 1 else logits_RV

    def slices(self, num_rows: int) -> list[slice]:
        width = slice_width(num_rows, self.num_tokens)
        return [slice(first, min(first + width, self.num_tokens)) for first in range(0, self.num_tokens, width)]

    def local(self, targets_R: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the targets' places in a slice (any for others), and which are in it."""
        local_R = targets_R - (self.first + part.start)
        inside_R = local_R.clamp(0, part.stop - part.start - 1)
        return inside_R, inside_R == local_R

    def globally(self, tokens: Tensor) -> Tensor:
        return tokens + self.first

    def gather(self, mine: Tensor) -> Tensor:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine.contiguous(), group=self.group)
        return torch.stack(found)

    def add(self, mine: Tensor) -> Tensor:
        """Sum over ranks; overwrites `mine`."""
        dist.all_reduce(mine, group=self.group)
        return mine


class RowFigures(NamedTuple):
    """Log q(target) and entropy of q (nats), and the largest absolute logit (no gradient), each [R], equal on every rank."""

    logp_R: Tensor
    entropy_R: Tensor
    largest_R: Tensor


@dataclass(frozen=True)
class OutputRows:
    """Hidden states [R, H] and this rank's output weight [V, H].  Logits are made a slice of the vocabulary at a time.

    `share`: of this rank in the sequences, if it has a part of the rows; what is given and returned is of all rows.
    """

    hidden_RH: Tensor
    weight_VH: Tensor
    shards: VocabShards
    share: SequenceShare | None = None

    def figures(self, targets_R: Tensor, temperature: float = 1.0) -> RowFigures:
        """Temperature 0 means 1.  The gradient of hidden states is this rank's part; backward makes all slices but one again."""
        (own_R,) = self._own(targets_R)
        found = _Figures.apply(*self._filled_up(self.hidden_RH, own_R), self.weight_VH, self.shards, temperature or 1.0)
        return RowFigures(*(self._of_all(each_R[: len(own_R)]) for each_R in found))

    @torch.no_grad()
    def by_rows(self, read: Callable[..., Tensor], *columns_R: Tensor) -> Tensor:
        """Join read(logits [B, V], each column [B]) of few rows at a time."""
        multiple = row_multiple(self.weight_VH)
        size = max(1, SLICE_NUMBERS // (self.shards.rows * multiple)) * multiple  # equal on every rank
        weight_VH = self.weight_VH[: self.shards.num_tokens]
        parts = zip(*(each.split(size) for each in self._filled_up(self.hidden_RH, *self._own(*columns_R))), strict=True)
        found = [read(self.shards.capped(F.linear(hidden_BH, weight_VH)), *columns_B) for hidden_BH, *columns_B in parts]
        return self._of_all(torch.cat(found)[: len(self.hidden_RH)])

    def _own(self, *columns_R: Tensor) -> Sequence[Tensor]:
        return columns_R if self.share is None else [self.share.own_rows(each_R) for each_R in columns_R]

    def _of_all(self, values_R: Tensor) -> Tensor:
        return values_R if self.share is None else self.share.of_all_rows(values_R)

    def _filled_up(self, *of_rows: Tensor) -> list[Tensor]:
        missing = -len(self.hidden_RH) % row_multiple(self.weight_VH)
        return [F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) if missing else each for each in of_rows]


class _Figures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, targets_R: Tensor, weight_VH: Tensor, shards: VocabShards, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        slices = shards.slices(len(hidden_RH))
        found_5SR = hidden_RH.new_empty(5, len(slices), len(hidden_RH), dtype=torch.float32)
        for found_5R, part in zip(found_5SR.unbind(1), slices, strict=True):
            logits_RV = shards.capped(F.linear(hidden_RH, weight_VH[part]))
            local_R, here_R = shards.local(targets_R, part)
            for rows in _blocks(logits_RV):
                shifted_BV = _scaled(logits_RV[rows], temperature)
                top_B = shifted_BV.amax(-1)
                found_5R[0, rows], found_5R[1, rows] = top_B, torch.maximum(top_B, -shifted_BV.amin(-1))
                found_5R[2, rows] = shifted_BV.gather(-1, local_R[rows, None])[:, 0] * here_R[rows]
                mass_BV = shifted_BV.sub_(top_B[:, None]).exp()
                found_5R[3, rows] = mass_BV.sum(-1)
                found_5R[4, rows] = mass_BV.mul_(shifted_BV).sum(-1)
                del shifted_BV, mass_BV  # or they would be held while the next rows' are made
        most_2R = found_5SR[:2].amax(1)
        if shards.size > 1:
            dist.all_reduce(most_2R, op=dist.ReduceOp.MAX, group=shards.group)
        top_R, largest_R = most_2R
        tops_SR, _, target_SR, mass_SR, weighted_SR = found_5SR
        below_SR = tops_SR - top_R
        sums_3R = torch.stack([target_SR, mass_SR * below_SR.exp(), (weighted_SR + mass_SR * below_SR) * below_SR.exp()]).sum(1)
        if shards.size > 1:
            dist.all_reduce(sums_3R, group=shards.group)
        target_R, mass_R, weighted_R = sums_3R
        log_mass_R = mass_R.log()
        entropy_R = log_mass_R - weighted_R / mass_R
        ctx.save_for_backward(hidden_RH, targets_R, weight_VH, top_R, log_mass_R, entropy_R)
        ctx.slices, ctx.shards, ctx.temperature, ctx.last_RV = slices, shards, temperature, logits_RV
        largest_R = largest_R * temperature
        ctx.mark_non_differentiable(largest_R)
        return target_R - top_R - log_mass_R, entropy_R, largest_R

    @staticmethod
    def backward(ctx: Any, grad_logp_R: Tensor, grad_entropy_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, targets_R, weight_VH, top_R, log_mass_R, entropy_R = ctx.saved_tensors
        logits_RV, ctx.last_RV = ctx.last_RV, None
        grad_RH = torch.zeros_like(hidden_RH, dtype=torch.float32)
        grad_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[2] else None
        for part in reversed(ctx.slices):
            if logits_RV is None:
                logits_RV = ctx.shards.capped(F.linear(hidden_RH, weight_VH[part]))
            local_R, here_R = ctx.shards.local(targets_R, part)
            pulled_R = grad_logp_R * here_R
            for rows in _blocks(logits_RV):
                logq_BV = _scaled(logits_RV[rows], ctx.temperature).sub_(top_R[rows, None]).sub_(log_mass_R[rows, None])
                # d logp / dx = onehot - q;  d H / dx = -q (log q + H)
                inner_BV = (logq_BV + entropy_R[rows, None]).mul_(grad_entropy_R[rows, None]).add_(grad_logp_R[rows, None])
                grad_BV = logq_BV.exp_().mul_(inner_BV).neg_()
                del inner_BV
                grad_BV.scatter_add_(-1, local_R[rows, None], pulled_R[rows, None])
                grad_BV = ctx.shards.before_cap(grad_BV, logits_RV[rows])
                logits_RV[rows] = grad_BV if ctx.temperature == 1.0 else grad_BV.div_(ctx.temperature)
                del logq_BV, grad_BV
            if grad_VH is not None:
                torch.mm(logits_RV.T, hidden_RH, out=grad_VH[part])
            grad_RH += logits_RV @ weight_VH[part]
            logits_RV = None
        return grad_RH.to(hidden_RH.dtype), None, grad_VH, None, None


def _blocks(logits_RV: Tensor) -> Iterator[slice]:
    size = _block_rows(logits_RV)
    return (slice(first, first + size) for first in range(0, len(logits_RV), size))


def _block_rows(logits_RV: Tensor) -> int:
    return max(1, CACHED_NUMBERS // logits_RV.shape[-1] if logits_RV.device.type == "cpu" else len(logits_RV))


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    copied_BV = logits_BV.to(torch.float32, copy=True)
    return copied_BV if temperature == 1.0 else copied_BV.div_(temperature)


def likeliest_share(logits_RV: Tensor, targets_R: Tensor, shards: VocabShards) -> Tensor:
    """Return 1 / n if the target is among the n likeliest (within rounding), else 0, [R], equal on every rank."""
    local_R = targets_R - shards.first
    here_R = (local_R >= 0) & (local_R < logits_RV.shape[-1])
    target_R = logits_RV.gather(-1, local_R.clamp(0, logits_RV.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    top_R, target_R = logits_RV.amax(-1), target_R.where(here_R, -torch.inf)
    if shards.size > 1:
        for over_all_R in (top_R, target_R):
            dist.all_reduce(over_all_R, op=dist.ReduceOp.MAX, group=shards.group)
    tie = max(4 * torch.finfo(torch.float32).eps, torch.finfo(logits_RV.dtype).eps)
    least_R = top_R - tie * top_R.abs()
    blocks = zip(logits_RV.split(_block_rows(logits_RV)), least_R.split(_block_rows(logits_RV)), strict=True)
    # The sum makes a float32 of each comparison.
    count_R = torch.cat([(block_BV >= least_B.unsqueeze(-1)).sum(-1, dtype=torch.float32) for block_BV, least_B in blocks])
    if shards.size > 1:
        dist.all_reduce(count_R, group=shards.group)
    return (target_R >= least_R) / count_R
