"""Held-out metrics: schedule, log, and measurement on the rows of supervised training.

Legend: N rows, K metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.evaluation import EarlyStopConfig, HeldoutConfig, Standard
from oppo_megatron.control.estimates import EarlyStop, Figures, moments_of, ratios
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.training import TrainedModel, forward_rows
from oppo_megatron.mcore.vocab import VocabShards
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.train.score_exchange import sum_over_ranks


class HeldoutLog:
    def __init__(self, standard: Standard | None):
        self.standard = standard
        self._by_step: dict[int, dict[str, Any]] = {}

    def record(self, step: int, figures: Figures) -> dict[str, Any]:
        fields = {
            "heldout": {name: mean for name, (mean, _) in figures.items()},
            "heldout_error": {name: error for name, (_, error) in figures.items()},
        }
        self._by_step[step] = fields
        return fields

    @staticmethod
    def describe(step: int, figures: Figures) -> str:
        told = ", ".join(f"{name} {mean:.4g}" for name, (mean, _) in figures.items())
        return f"held out after {step} steps: {told}"

    def best(self) -> tuple[int, float] | None:
        if self.standard is None:
            return None
        values = [(step, mean) for step, mean in self.means(self.standard.metric).items() if step and mean == mean]
        sign = 1 if self.standard.mode == "max" else -1
        return max(values, key=lambda pair: (sign * pair[1], -pair[0]), default=None)

    def means(self, metric: str) -> dict[int, float]:
        known = ((step, fields["heldout"].get(metric)) for step, fields in self._by_step.items())
        return {step: mean for step, mean in known if mean is not None}

    def describe_best(self) -> str | None:
        found = self.best()
        if found is None or self.standard is None:
            return None
        return f"best step {found[0]}: {self.standard.metric} {found[1]:.4g}"

    def summary(self, kept: tuple[float, Position] | None) -> dict[str, Any]:
        """Fields of the summary.  The best checkpoint `kept` defines the best step if no held-out metric does."""
        found = self.best() or (None if kept is None else (kept[1].step, kept[0]))
        best = None
        if found is not None and self.standard is not None:
            best = {"step": found[0], "metric": self.standard.metric, "value": found[1]}
        heldout = {
            str(step): {"mean": fields["heldout"], "error": fields["heldout_error"]} for step, fields in self._by_step.items()
        }
        return {"heldout": heldout, "best": best}

    def state_dict(self) -> list[tuple[int, dict[str, Any]]]:
        return list(self._by_step.items())

    def load_state_dict(self, state: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        self._by_step = {step: dict(fields) for step, fields in state}


RowT = TypeVar("RowT", bound=tuple[list[Any], ...])
RowC = TypeVar("RowC", bound=tuple[list[Any], ...], contravariant=True)

Measure = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, output of its rows) -> [N, 1 + K] in float64: each row's weight, and its sum of each metric."""


class Measured(Protocol[RowC]):
    def micro_batches(self, rows: Sequence[RowC], budget: int, device: torch.device) -> list[MicroBatch]: ...

    def measure(self, rows: Sequence[RowC], vocab: VocabShards) -> Measure: ...


TakePoint = Callable[[TrainedModel, Sequence[Any], int, int], None]
"""(model, rows, step, token budget): measures an input of the loss on a whole batch (KTO's reference point)."""


class HeldoutSchedule:
    """When held-out metrics are due, and whether they end the run; the same on every rank."""

    def __init__(self, every_steps: int, stop: EarlyStopConfig | None):
        self.every_steps = every_steps
        self.stop = None if stop is None else EarlyStop(stop)

    @property
    def over(self) -> bool:
        return self.stop is not None and self.stop.due

    def describe_end(self) -> str | None:
        return self.stop.describe() if self.stop is not None and self.stop.due else None

    def due(self, step: int, last: bool) -> bool:
        return step == 0 or last or bool(self.every_steps and step % self.every_steps == 0)

    def observe(self, step: int, figures: Figures) -> None:
        if self.stop is not None:
            self.stop.observe(step, figures[self.stop.config.standard.metric][0])

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.stop is None else self.stop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.stop is not None and state is not None:
            self.stop.load_state_dict(dict(state))


class Heldout(HeldoutSchedule, Generic[RowT]):
    """The held-out rows of a run.  Collective of the world, with the same result on every rank."""

    def __init__(
        self,
        config: HeldoutConfig,
        stop: EarlyStopConfig | None,
        task: Measured[RowT],
        rows: Sequence[RowT],
        metrics: Sequence[str],
        world: World,
        take_point: TakePoint | None = None,
    ):
        super().__init__(config.every_steps, stop)
        self.task, self.metrics, self.world, self.take_point = task, metrics, world, take_point
        self.rows = rows[: config.most_rows]

    def measure(self, trained: TrainedModel, step: int, budget: int) -> Figures:
        if self.take_point is not None:
            self.take_point(trained, self.rows, step, budget)
        width, what = 1 + len(self.metrics), f"held-out metrics after step {step}"
        task = self.task
        moments = measure_rows(self.world, trained, self.rows, task.micro_batches, task.measure, width, budget, what)
        figures = dict(zip(self.metrics, ratios(moments, width), strict=True))
        self.observe(step, figures)
        return figures


def measure_rows(
    world: World,
    trained: TrainedModel,
    rows: Sequence[RowT],
    micro_batches: Callable[[Sequence[RowT], int, torch.device], list[MicroBatch]],
    measure: Callable[[Sequence[RowT], VocabShards], Measure],
    width: int,
    budget: int,
    what: str,
) -> list[float]:
    """Moments of `measure`'s table (`width` columns) over `rows`, divided among replicas.  Collective of the world."""
    groups = trained.model.groups
    mine = rows[groups.dp_rank :: groups.dp]
    device, finish = next(trained.model.parameters()).device, measure(mine, trained.model.vocab)
    tables = forward_rows(trained.chunks, micro_batches(mine, budget, device), finish)
    speaks = groups.is_last_stage and groups.tp_rank == 0  # one rank for each replica
    table = torch.cat(tables).tolist() if speaks and tables else []
    with waiting_for(what, world.activity):
        return sum_over_ranks(moments_of(table, width), world.device)
