"""The loop of supervised training, on every rank; a task turns rows into micro-batches and gives their loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from oppo_megatron.algorithms.supervised_losses import means
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.control.estimates import Figures
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Passed, batches
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss, TrainedModel
from oppo_megatron.mcore.vocab import VocabShards
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.packing import Packing, balance, packing_figures
from oppo_megatron.train.heldout import Heldout, Measure, Point
from oppo_megatron.train.logs.supervised_report import Report
from oppo_megatron.train.memory_meter import MemoryMeter
from oppo_megatron.train.saving.saver import SupervisedSaver

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])


class Task(Protocol[RowT]):
    """The part of supervised training that depends on its kind."""

    title: str
    head: Head

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[RowT]: ...

    def num_tokens(self, row: RowT) -> int:
        """Tokens that the model reads of a row."""
        ...

    def micro_batches(self, rows: Sequence[RowT], budget: int, device: torch.device) -> list[MicroBatch]: ...

    def loss(self, rows: Sequence[RowT], vocab: VocabShards) -> Loss:
        """Mean loss of the batch `rows`; its statistics are sums with their `count`."""
        ...

    def measure(self, rows: Sequence[RowT], vocab: VocabShards) -> Measure:
        """For each of `rows` its weight, and the sums of the held-out metrics over it."""
        ...


@dataclass
class SupervisedTrainer(Generic[RowT]):
    """One rank's view of the run.  `steps` counts the whole run's; `report` exists on one rank, None on the others.

    `point` is measured for each batch before training on it, if the task needs one.
    """

    config: SupervisedConfig
    task: Task[RowT]
    rows: Sequence[RowT]
    heldout: Heldout[RowT] | None
    trained: TrainedModel
    saver: SupervisedSaver
    report: Report | None
    spans: SpanRecorder
    activity: Activity
    memory: MemoryMeter
    passed: Passed
    steps: int
    point: Point[RowT] | None = None

    def run(self) -> bool:
        """Make the remaining steps, measure and save; False if the run was asked to stop and has saved."""
        if self.passed.steps == 0:
            figures = self._measure()
            if self.report and figures is not None:
                self.report.before(figures)
        for index in self._order():
            if self.over:  # a run that is resumed may have been
                break
            figures = self._step(index)
            heldout = self._measure()
            if heldout is not None:
                figures |= self.memory.by_rank.peak_fields()
            if self.report:
                self.report.step(self.passed.steps, figures, self.saver.take_cost(), heldout)
            self.saver.look_around()
            if self.saver.due(self.passed.steps):
                self.saver.save(self)
                if self.saver.stopping and not self.over:
                    return False
        self.saver.conclude()
        self.memory.look()
        memory = self.memory.of_all_ranks()
        if self.report:
            self.report.end(None if self.heldout is None else self.heldout.describe_end(), memory)
        return True

    @property
    def over(self) -> bool:
        """True if nothing is left to train, or a held-out metric ends the run."""
        return self.passed.steps >= self.steps or (self.heldout is not None and self.heldout.over)

    @property
    def position(self) -> Position:
        return Position(self.passed.steps)

    @property
    def within_step(self) -> bool:
        return False

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        return {"model": self.trained}

    @property
    def note(self) -> Callable[[str], None] | None:
        return None if self.report is None else self.report.note

    def finish_step(self) -> None:
        """Exchange the memory of all ranks; a step leaves nothing under way."""
        self.memory.of_all_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model, on the rank that has the report."""
        assert self.report is not None
        return {
            "done": self.passed.steps,
            "rows": self.passed.rows,
            "updates": self.trained.updates,
            "elapsed_s": self.report.elapsed_s,
            "heldout": self.report.heldout.state_dict(),
            "early_stop": None if self.heldout is None else self.heldout.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has and the constructor does not take."""
        if self.heldout is not None:
            self.heldout.load_state_dict(state["early_stop"])
        if self.report is not None:
            self.report.heldout.load_state_dict(state["heldout"])

    def _order(self) -> Iterator[list[int]]:
        config = self.config
        return batches(
            len(self.rows),
            config.batch_size,
            config.seed,
            config.epochs,
            config.steps,
            config.data.shuffle,
            self.passed,
        )

    def _measure(self) -> Figures | None:
        """Measure the held-out metrics if they are due."""
        step = self.passed.steps
        if self.heldout is None or not self.heldout.due(step, last=step >= self.steps):
            return None
        budget = self.config.runtime.micro_batch_tokens
        with self.spans.span("evaluate", role="model", step=step), self.activity.doing(f"evaluation after step {step}"):
            figures = self.heldout.measure(self.trained, step, budget)
        self.saver.look_at(step, figures)
        self.memory.look()
        self.memory.of_all_ranks()
        return figures

    def _step(self, index: Sequence[int]) -> dict[str, Any]:
        """Train on a batch and return the figures of the step."""
        start, self.passed = time.monotonic(), self.passed.step(len(index))
        step, chosen = self.passed.steps, [self.rows[i] for i in index]
        groups, device = self.trained.model.groups, next(self.trained.model.parameters()).device
        lengths, budget = [self.task.num_tokens(row) for row in chosen], self.config.runtime.micro_batch_tokens
        shares = balance(lengths, groups.dp)
        if self.point is not None:
            with self.spans.span("point", role="model", step=step):
                self.point.take(self.trained, chosen, step, budget)
        mine, loss = [chosen[i] for i in shares[groups.dp_rank]], self.task.loss(chosen, self.trained.model.vocab)
        with self.spans.span("update", role="model", step=step), self.activity.doing(f"update, step {step}"):
            report = self.trained.step(self.task.micro_batches(mine, budget, device), loss)
        packing = Packing.of([[lengths[i] for i in share] for share in shares], budget)
        self.spans.flush()
        step_s, num_tokens = time.monotonic() - start, sum(lengths)
        return {
            "step_s": step_s,
            **means(report.stats),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / step_s,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            **packing_figures([packing]),
        }
