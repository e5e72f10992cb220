"""The update loop of actor and critic: epochs, minibatches, replicas' shares, packed micro-batches.

Legend: T response tokens of the whole batch (packed), R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments
from oppo_megatron.algorithms.packed import TokenStats, tokens_of_rows
from oppo_megatron.chunks import FREE
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.mcore.batch import MicroBatch, pack_together, split_rows
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import Packing, balance, packing_figures

UpdateLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, output of its rows, num_tokens of the minibatch, whether it is the first minibatch) -> (loss, sums)."""

RowWeights = Callable[[Sequence[int]], list[float]]
"""Rows of a minibatch, group by group -> each row's token weight."""

Units = Callable[[Sequence[int]], list[list[int]]]
"""Rows of a minibatch, group by group -> rows that are read, in lists that must share a micro-batch."""


def each_alone(rows: Sequence[int]) -> list[list[int]]:
    return [[row] for row in rows]


@dataclass(frozen=True)
class UpdateSettings:
    epochs: int
    minibatches: int
    micro_batch_tokens: int
    seed: int
    step: int
    device: torch.device
    version: int = 0
    group_size: int = 1

    @classmethod
    def of(cls, config: TrainConfig, step: int, device: torch.device, version: int = 0) -> UpdateSettings:
        ppo, budget = config.ppo, config.runtime.micro_batch_tokens
        return cls(ppo.epochs, ppo.minibatches, budget, config.seed, step, device, version, config.rollout.group_size)


@dataclass(frozen=True)
class History:
    """Moments of trained scores (`seen`); optimizer steps of the critic before the actor's first one (`warmed`)."""

    seen: Moments = NOTHING_SEEN
    warmed: int = 0

    @classmethod
    def of(cls, numbers: Mapping[str, float | None]) -> History:
        count, total, squares, warmed = (numbers.get(name) or 0 for name in ("count", "total", "squares", "warmed"))
        return cls(Moments(int(count), total, squares), int(warmed))

    def numbers(self) -> dict[str, float]:
        seen = self.seen
        return {"count": seen.count, "total": seen.total, "squares": seen.total_of_squares, "warmed": self.warmed}


def begin_update(trained: TrainedModel, batch: Sequence[Rollout], settings: UpdateSettings, units: Units = each_alone) -> None:
    """Run the first forward pass of `run_update`; does nothing in a pipeline."""
    groups = trained.model.groups
    mine = next(_shares(batch, groups.dp, settings, units))[groups.dp_rank]
    if trained.goes_ahead and mine:
        lengths = torch.tensor([len(r.tokens) for r in batch])
        trained.ahead(_micro_batches(trained, batch, mine, lengths, {}, settings)[0])


def run_update(
    trained: TrainedModel, batch: Sequence[Rollout], extra_T: dict[str, Tensor], loss: UpdateLoss, settings: UpdateSettings,
    weights: RowWeights | None = None, units: Units = each_alone,
) -> list[dict[str, float]]:  # fmt: skip
    """Make one optimizer step per minibatch of each epoch; return a report of each, summed over replicas.

    `extra_T`: inputs of the loss, to which `weights` adds `share` [T].  Ranks pass the whole batch; replicas divide minibatches.
    """
    reports = []
    lengths = torch.tensor([len(r.tokens) for r in batch])
    groups = trained.model.groups
    for number, shares in enumerate(_shares(batch, groups.dp, settings, units)):
        minibatch, mine = sorted(i for share in shares for unit in share for i in unit), shares[groups.dp_rank]
        shared_T, of_rows = extra_T, [] if weights is None else weights(minibatch)
        if any(weight != 1 for weight in of_rows):
            share_B = torch.zeros(len(lengths))  # 0 for rows of other minibatches
            share_B[minibatch] = torch.tensor(of_rows)
            shared_T = extra_T | {"share": on_device(share_B.repeat_interleave(lengths), settings.device)}
        minibatch_loss = partial(loss, num_tokens=int(lengths[minibatch].sum()), first=number == 0)
        report = trained.step(_micro_batches(trained, batch, mine, lengths, shared_T, settings), minibatch_loss)
        reports.append({"grad_norm": report.grad_norm, "lr": report.lr} | report.stats)
    return reports


def _micro_batches(
    trained: TrainedModel, batch: Sequence[Rollout], units: list[list[int]], lengths: Tensor, extra_T: dict[str, Tensor],
    settings: UpdateSettings,
) -> list[MicroBatch]:  # fmt: skip
    answered = [[(batch[i].prompt.tokens, batch[i].tokens) for i in unit] for unit in units]
    micros = pack_together(answered, settings.micro_batch_tokens, settings.device)
    chosen = on_device(tokens_of_rows(lengths, [i for unit in units for i in unit]), settings.device)
    unit_lengths = [sum(len(response) for _, response in unit) for unit in answered]
    for name, values_T in extra_T.items():
        for micro, piece in zip(micros, split_rows(values_T[chosen], unit_lengths, micros), strict=True):
            micro.extra[name] = piece
    return with_routes(trained, micros, [[batch[i] for i in unit] for unit in units])


def with_routes(trained: TrainedModel, micros: list[MicroBatch], units: Sequence[Sequence[Rollout]]) -> list[MicroBatch]:
    """Give the policy's micro-batches the routes of their tokens; `units`: the rollouts of each `index`."""
    for micro in micros if trained.model.head == "lm" else ():
        rollouts = (rollout for unit in micro.index for rollout in units[unit])
        micro.routes = [route for rollout in rollouts for route in rollout.routes or [FREE] * len(rollout.tokens)]
    return micros


def update_packing(
    batch: Sequence[Rollout], num_replicas: int, settings: UpdateSettings, units: Units = each_alone
) -> dict[str, float]:
    read = [rollout.num_tokens - 1 for rollout in batch]  # a last token predicts nothing and is not read
    steps = [
        [[sum(read[i] for i in unit) for unit in share] for share in shares]
        for shares in _shares(batch, num_replicas, settings, units)
    ]
    return packing_figures([Packing.of(parts, settings.micro_batch_tokens) for parts in steps])


def stats_dict(stats: TokenStats) -> dict[str, Tensor]:
    return {f.name: getattr(stats, f.name) for f in fields(stats)}


def _shares(
    batch: Sequence[Rollout], num_replicas: int, settings: UpdateSettings, units: Units
) -> Iterator[list[list[list[int]]]]:
    for minibatch in minibatches_of(len(batch), settings):
        read = units(minibatch)
        parts = balance([sum(batch[i].num_tokens for i in unit) for unit in read], num_replicas)
        yield [[read[i] for i in part] for part in parts]


def num_minibatches(num_rows: int, settings: UpdateSettings) -> int:
    """Steps per epoch; at most the number of groups."""
    return min(settings.minibatches, num_rows // settings.group_size)


def minibatches_of(num_rows: int, settings: UpdateSettings) -> Iterator[list[int]]:
    size = settings.group_size
    num_groups, count = num_rows // size, num_minibatches(num_rows, settings)
    for epoch in range(settings.epochs):
        order = np.arange(num_groups)
        if count > 1:
            np.random.Generator(np.random.Philox(key=[settings.seed, (settings.step << 16) + epoch])).shuffle(order)
        for part in np.array_split(order, count):
            yield (part[:, None] * size + np.arange(size)).flatten().tolist()
