"""Random batches on which implementations are compared, as rows or a padded matrix (B rows, L tokens of the longest)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.replay.formulas import Batch

LIMIT = 12
BATCHES = 50


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
    batch = Batch(
        scores_B=scores,
        groups=[row // size for row in range(rows)],
        cut=[length == LIMIT for length in lengths.tolist()],
        old=old,
        reference=reference,
        values=values,
        greedy={prompt: (score, False) for prompt, score in enumerate(of_greedy)},
    )
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
