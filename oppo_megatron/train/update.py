"""The update loop of actor and critic: epochs, minibatches, replicas' shares, packed micro-batches.

Legend: T response tokens of the whole batch (packed), R rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments
from oppo_megatron.algorithms.packed import TokenStats, tokens_of_rows
from oppo_megatron.chunks import FREE
from oppo_megatron.config.derived import rows_per_prompt
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.mcore.batch import Family, MicroBatch, pack_together, read_tokens, split_rows
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
    """`sharing`: neighbouring rows of a group, whose prompt a micro-batch reads once (1: each row reads its own)."""

    epochs: int
    minibatches: int
    micro_batch_tokens: int
    seed: int
    step: int
    device: torch.device
    version: int = 0
    group_size: int = 1
    sharing: int = 1

    @classmethod
    def of(cls, config: TrainConfig, step: int, device: torch.device, version: int = 0) -> UpdateSettings:
        ppo, budget, size = config.ppo, config.runtime.micro_batch_tokens, config.rollout.group_size
        return cls(ppo.epochs, ppo.minibatches, budget, config.seed, step, device, version, size, rows_per_prompt(config))


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
    micros = micro_batches(trained, batch, units, settings.micro_batch_tokens, settings.sharing, settings.device)
    chosen = on_device(tokens_of_rows(lengths, [i for unit in units for i in unit]), settings.device)
    unit_lengths = [int(lengths[unit].sum()) for unit in units]
    for name, values_T in extra_T.items():
        for micro, piece in zip(micros, split_rows(values_T[chosen], unit_lengths, micros), strict=True):
            micro.extra[name] = piece
    return micros


def micro_batches(
    trained: TrainedModel, batch: Sequence[Rollout], units: Sequence[list[int]], budget: int, sharing: int, device: torch.device
) -> list[MicroBatch]:
    """Pack rows in units; the policy's tokens get their routes."""
    micros = pack_together([families(batch, unit, sharing) for unit in units], budget, device)
    for micro in micros if trained.model.head == "lm" else ():
        rollouts = (batch[i] for unit in micro.index for i in units[unit])
        micro.routes = [route for rollout in rollouts for route in rollout.routes or [FREE] * len(rollout.tokens)]
    return micros


def families(batch: Sequence[Rollout], unit: Sequence[int], sharing: int) -> list[Family]:
    """Prompts and responses of a unit.  Neighbours share a prompt if the same experts read its last token."""

    def shared(row: int) -> object:
        return (batch[row].prompt.tokens, batch[row].routes[:1]) if sharing > 1 else row

    alike = [list(rows) for _, rows in groupby(unit, shared)]
    return [(batch[rows[0]].prompt.tokens, [batch[row].tokens for row in rows]) for rows in alike]


def divide(
    batch: Sequence[Rollout], units: Sequence[list[int]], num_replicas: int, budget: int, sharing: int
) -> list[list[list[int]]]:
    """Divide units among replicas.  Groups are joined whole, or in halves, quarters, ...: whichever balances tokens best.

    Joined units fit into a micro-batch of `budget` tokens, so a group with more tokens is cut and its prompt read again.
    """
    found = []
    for halvings in range(sharing.bit_length() if num_replicas > 1 else 1):
        joined: list[list[int]] = []
        for unit in units:
            if joined and joined[-1][0] // sharing == unit[0] // sharing:
                both = [*joined[-1], *unit]
                if len(both) <= sharing >> halvings and read_tokens(families(batch, both, sharing)) <= budget:
                    joined[-1] = both
                    continue
            joined.append(unit)
        costs = [read_tokens(families(batch, unit, sharing)) + len(unit) for unit in joined]
        parts = balance(costs, num_replicas)
        largest = max(sum(costs[i] for i in part) for part in parts)
        found.append((largest, [[joined[i] for i in part] for part in parts]))
    return min(found, key=lambda each: each[0])[1]


def update_packing(
    batch: Sequence[Rollout], num_replicas: int, settings: UpdateSettings, units: Units = each_alone
) -> dict[str, float]:
    steps = []
    for shares in _shares(batch, num_replicas, settings, units):
        read = [[read_tokens(families(batch, unit, settings.sharing)) for unit in share] for share in shares]
        rows = [batch[i].num_tokens - 1 for share in shares for unit in share for i in unit]
        steps.append(replace(Packing.of(read, settings.micro_batch_tokens), padded=len(rows) * max(rows)))
    return packing_figures(steps)


def stats_dict(stats: TokenStats) -> dict[str, Tensor]:
    return {f.name: getattr(stats, f.name) for f in fields(stats)}


def _shares(
    batch: Sequence[Rollout], num_replicas: int, settings: UpdateSettings, units: Units
) -> Iterator[list[list[list[int]]]]:
    for minibatch in minibatches_of(len(batch), settings):
        yield divide(batch, units(minibatch), num_replicas, settings.micro_batch_tokens, settings.sharing)


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
