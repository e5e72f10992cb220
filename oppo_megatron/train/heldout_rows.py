"""Held-out rows of supervised training, and their measurement with the current model.

Legend: N rows, K metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.evaluation import EarlyStopConfig, HeldoutConfig
from oppo_megatron.control.early_stop import EarlyStop
from oppo_megatron.control.estimates import Figures, moments_of, ratios
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.training import TrainedModel, forward_rows
from oppo_megatron.mcore.vocab_shards import VocabShards
from oppo_megatron.train.score_exchange import sum_over_ranks

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])
RowC = TypeVar("RowC", bound=tuple[list[Any], ...], contravariant=True)

Measure = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, output of its rows) -> [N, 1 + K] in float64: what each row weighs, and each metric's sum over it."""


class Measured(Protocol[RowC]):
    """What a task says of rows that are measured."""

    def micro_batches(self, rows: Sequence[RowC], budget: int, device: torch.device) -> list[MicroBatch]: ...

    def measure(self, rows: Sequence[RowC], vocab: VocabShards) -> Measure: ...


class Point(Protocol[RowC]):
    """What a loss needs to know of a whole batch beforehand: KTO's reference point."""

    def take(self, trained: TrainedModel, rows: Sequence[RowC], step: int, budget: int) -> None: ...


class Heldout(Generic[RowT]):
    """The held-out rows of a run.  Every rank of the world makes the calls, with the same result."""

    def __init__(
        self,
        config: HeldoutConfig,
        stop: EarlyStopConfig | None,
        task: Measured[RowT],
        rows: Sequence[RowT],
        metrics: Sequence[str],
        world: World,
        point: Point[RowT] | None = None,
    ):
        self.point = point
        self.every, self.task, self.metrics, self.world = config.every_steps, task, metrics, world
        self.rows = rows[: config.max_rows]
        self.stop = None if stop is None else EarlyStop(stop)

    @property
    def over(self) -> bool:
        """Whether the run is to end early."""
        return self.stop is not None and self.stop.due

    def describe_end(self) -> str | None:
        """Why the run ends early, if it does."""
        return self.stop.describe() if self.stop is not None and self.stop.due else None

    def due(self, step: int, last: bool) -> bool:
        """Before the first step, after the last, and every so often."""
        return step == 0 or last or bool(self.every and step % self.every == 0)

    def measure(self, trained: TrainedModel, step: int, budget: int) -> Figures:
        """The metrics after `step` steps, in micro-batches of at most `budget` tokens; early stopping learns of them."""
        if self.point is not None:
            self.point.take(trained, self.rows, step, budget)
        width, what = 1 + len(self.metrics), f"held-out metrics after step {step}"
        moments = measure_rows(self.world, trained, self.rows, self.task, width, budget, what)
        figures = dict(zip(self.metrics, ratios(moments, width), strict=True))
        if self.stop is not None:
            self.stop.observe(step, figures[self.stop.config.standard.metric][0])
        return figures

    def state_dict(self) -> dict[str, Any] | None:
        """Of early stopping, in plain JSON types."""
        return None if self.stop is None else self.stop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.stop is not None and state is not None:
            self.stop.load_state_dict(dict(state))


def measure_rows(
    world: World,
    trained: TrainedModel,
    rows: Sequence[RowT],
    task: Measured[RowT],
    width: int,
    budget: int,
    what: str,
) -> list[float]:
    """Moments of the table of `width` columns that the task makes of `rows`, which the replicas share.

    Every rank of the world makes the call, with the same result.  `what`: the wait for each other, in words.
    """
    groups = trained.model.groups
    mine = rows[groups.dp_rank :: groups.dp]
    device, finish = next(trained.model.parameters()).device, task.measure(mine, trained.model.vocab)

    tables = forward_rows(trained.chunks, task.micro_batches(mine, budget, device), finish)
    speaks = groups.is_last_stage and groups.tp_rank == 0  # one rank for each replica
    table = torch.cat(tables).tolist() if speaks and tables else []
    with waiting_for(what, world.activity):
        return sum_over_ranks(moments_of(table, width), world.device)
