"""The tasks of supervised training: rows as packed micro-batches, and their loss.

Legend: N rows, K metrics, R completion tokens (or labelled steps) of a micro-batch, V vocabulary shard, S sequences: chosen,
rejected, chosen, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import token_noise
from oppo_megatron.algorithms.supervised_losses import (
    mean_loss,
    next_token_loss,
    pair_columns,
    preference_loss,
    preference_table,
    row_columns,
    step_loss,
    step_table,
    table_of,
)
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.evaluation import PREFERENCE_METRICS, EarlyStopConfig, HeldoutConfig
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.control.estimates import Figures, moments_of, ratios
from oppo_megatron.data.prompts import RowOrder
from oppo_megatron.data.supervised_rows import Completion, Marked, Pair, Passed, Rows, Steps, batches
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.batch import Answered, MicroBatch, pack_at, pack_responses, pack_together, whole_sequences
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.training import TrainedModel, forward_rows
from oppo_megatron.mcore.vocab import OutputRows, likeliest_share
from oppo_megatron.schedule.packing import pack_by_tokens
from oppo_megatron.train.heldout import HeldoutSchedule
from oppo_megatron.train.reference_pass import Table, answer_logprobs, key_of
from oppo_megatron.train.score_exchange import sum_over_ranks

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])

Measure = Callable[[Sequence[RowT], MicroBatch, Any], Tensor]
"""(rows, micro-batch, its output) -> [N, 1 + K] in float64: each row's weight, and its sum of each metric."""

TakePoint = Callable[[TrainedModel, Sequence[Any], int, int], None]
"""(model, rows, step, token budget): measures an input of the loss on a whole batch (KTO's reference point)."""

Share = tuple[Tensor, dict[str, Tensor]]
"""A micro-batch's share of the mean loss, and of its statistics: sums, with their `count`."""


class Task(ABC, Generic[RowT]):
    title: str
    head: Head = "lm"

    @abstractmethod
    def num_tokens(self, row: RowT) -> int:
        """Tokens that the model reads."""

    @abstractmethod
    def micro_batches(self, rows: Sequence[RowT], budget: int, device: torch.device) -> list[MicroBatch]: ...

    @abstractmethod
    def loss(self, rows: Sequence[RowT], batch: MicroBatch, output: Any) -> Share:
        """Share of the mean loss of all `rows`."""

    @abstractmethod
    def measure(self, rows: Sequence[RowT], batch: MicroBatch, output: Any) -> Tensor:
        """Table of a `Measure`."""


class FineTuning(Task[Completion]):
    """Next-token prediction on completions."""

    title = "sft"

    def num_tokens(self, row: Completion) -> int:
        return len(row.prompt) + len(row.completion) - 1  # the last token predicts nothing

    def micro_batches(self, rows: Sequence[Completion], budget: int, device: torch.device) -> list[MicroBatch]:
        return pack_responses([row.prompt for row in rows], [row.completion for row in rows], budget, device)

    def loss(self, rows: Sequence[Completion], batch: MicroBatch, output: OutputRows) -> Share:
        return next_token_loss(output.figures(batch.targets_R).logp_R, sum(len(row.completion) for row in rows))

    def measure(self, rows: Sequence[Completion], batch: MicroBatch, output: OutputRows) -> Tensor:
        """Per row: completion tokens, sum of negative log-probs, number of most likely tokens."""
        logp_R = output.figures(batch.targets_R).logp_R
        right_R = output.by_rows(partial(likeliest_share, shards=output.shards), batch.targets_R)
        columns_R3 = torch.stack([torch.ones_like(logp_R), -logp_R, right_R], -1).double()
        pieces = columns_R3.split([len(rows[i].completion) for i in batch.index])
        return torch.stack([piece.sum(0) for piece in pieces])


class RewardModelling(Task[Pair]):
    """The scalar at an answer's last token is its score."""

    title = "rm"
    head: Head = "scalar"

    def num_tokens(self, row: Pair) -> int:
        return 2 * len(row.prompt) + len(row.chosen) + len(row.rejected)  # the prompt is read with each answer

    def micro_batches(self, rows: Sequence[Pair], budget: int, device: torch.device) -> list[MicroBatch]:
        """A pair with more than `budget` tokens is its own micro-batch."""
        sequences = [([*row.prompt, *row.chosen], [*row.prompt, *row.rejected]) for row in rows]
        return [
            whole_sequences(index, [sequence for i in index for sequence in sequences[i]], device)
            for index in pack_by_tokens([self.num_tokens(row) for row in rows], budget)
        ]

    def loss(self, rows: Sequence[Pair], batch: MicroBatch, output: Tensor) -> Share:
        return preference_loss(output.view(-1, 2), len(rows))

    def measure(self, rows: Sequence[Pair], batch: MicroBatch, output: Tensor) -> Tensor:
        """Per pair: 1, loss, accuracy and margin."""
        return preference_table(output.view(-1, 2)).double()


class ProcessRewardModelling(Task[Steps]):
    """The scalar at a step's last token is its logit of being right."""

    title = "prm"
    head: Head = "scalar"

    def num_tokens(self, row: Steps) -> int:
        return len(row.prompt) + len(row.completion)

    def micro_batches(self, rows: Sequence[Steps], budget: int, device: torch.device) -> list[MicroBatch]:
        """Outputs at the labelled ends, labels in `extra`."""
        sequences = [[*row.prompt, *row.completion] for row in rows]
        batches = pack_at(sequences, [[len(row.prompt) + end for end in row.ends] for row in rows], budget, device)
        for batch in batches:
            labels = [label for i in batch.index for label in rows[i].labels]
            batch.extra["labels"] = on_device(labels, device, torch.float32)
        return batches

    def loss(self, rows: Sequence[Steps], batch: MicroBatch, output: Tensor) -> Share:
        return step_loss(output, batch.extra["labels"], sum(len(row.labels) for row in rows))

    def measure(self, rows: Sequence[Steps], batch: MicroBatch, output: Tensor) -> Tensor:
        """Per row: number of labels, sum of losses, number of right predictions."""
        columns_R3 = step_table(output, batch.extra["labels"]).double()
        pieces = columns_R3.split([len(rows[i].labels) for i in batch.index])
        return torch.stack([piece.sum(0) for piece in pieces])


class Preferences(Task[RowT]):
    has_mismatched = False

    def __init__(self) -> None:
        self.reference: Table = {}

    @abstractmethod
    def answers(self, row: RowT) -> Sequence[Answered]: ...

    @abstractmethod
    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]: ...

    def all_answers(self, config: DPOConfig, rows: Rows[RowT], held: Sequence[RowT], passed: Passed) -> list[Answered]:
        others = [*self.mismatched(held)]
        if self.has_mismatched:
            order = RowOrder(rows.sources, config.seed, config.data.shuffle)
            steps = batches(order, config.batch_size, config.epochs, config.steps, passed)
            others += [other for index in steps for other in self.mismatched([rows[i] for i in index])]
        return [answer for row in (*rows, *held, *others) for answer in self.answers(row)]

    def mismatched(self, rows: Sequence[RowT]) -> Sequence[RowT]:
        """Rows read without gradient before training; empty for most losses."""
        return ()

    def num_tokens(self, row: RowT) -> int:
        return sum(len(prompt) + len(answer) - 1 for prompt, answer in self.answers(row))  # a last token predicts nothing

    def micro_batches(self, rows: Sequence[RowT], budget: int, device: torch.device) -> list[MicroBatch]:
        """Keep all answers of a row together, because the loss compares them."""
        answers = [self.answers(row) for row in rows]
        batches = pack_together([[(prompt, [answer]) for prompt, answer in own] for own in answers], budget, device)
        for batch in batches:
            known = [self.reference[key_of(*each)] for i in batch.index for each in answers[i]]
            batch.extra["reference"] = on_device(known, device, torch.float64)
            batch.extra["counts"] = on_device(list(batch.counts), device, torch.float64)
        return batches

    def loss(self, rows: Sequence[RowT], batch: MicroBatch, output: OutputRows) -> Share:
        return mean_loss(self.columns(batch, answer_logprobs(batch, output)), len(rows))

    def measure(self, rows: Sequence[RowT], batch: MicroBatch, output: OutputRows) -> Tensor:
        """Per row: 1, and the held-out metrics."""
        return table_of(self.columns(batch, answer_logprobs(batch, output)), PREFERENCE_METRICS)


class PairPreferences(Preferences[Pair]):
    """Raises the chosen answer over the rejected one (DPO)."""

    title = "dpo"

    def __init__(self, config: DPOConfig):
        super().__init__()
        self.rule, self.noise = config.dpo, token_noise(config.model.dtype)

    def answers(self, row: Pair) -> Sequence[Answered]:
        return (row.prompt, row.chosen), (row.prompt, row.rejected)

    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        return pair_columns(logp_S, batch.extra["reference"], batch.extra["counts"], self.rule, self.noise)


class MarkedPreferences(Preferences[Marked]):
    """Raises wanted completions over `point` (z0), lowers unwanted ones (KTO)."""

    title = "kto"

    def __init__(self, config: DPOConfig):
        super().__init__()
        self.rule, self.max_tokens = config.dpo, config.max_tokens
        self.point, self.noise = 0.0, token_noise(config.model.dtype)
        self.has_mismatched = config.dpo.loss == "kto"

    def answers(self, row: Marked) -> Sequence[Answered]:
        return ((row.prompt, row.completion),)

    def mismatched(self, rows: Sequence[Marked]) -> Sequence[Marked]:
        """Pair each prompt with the completion of the previous other prompt, cyclically; empty if all prompts are the same."""
        if not self.has_mismatched or len({tuple(row.prompt) for row in rows}) < 2:
            return ()
        found = []
        for place, row in enumerate(rows):
            other = next(rows[place - back] for back in range(1, len(rows)) if rows[place - back].prompt != row.prompt)
            found.append(Marked(row.prompt, other.completion[: self.max_tokens - len(row.prompt)], [0]))
        return found

    def micro_batches(self, rows: Sequence[Marked], budget: int, device: torch.device) -> list[MicroBatch]:
        batches = super().micro_batches(rows, budget, device)
        for batch in batches:
            signs = [1.0 if rows[i].wanted[0] else -1.0 for i in batch.index]
            batch.extra["sign"] = on_device(signs, device, torch.float64)
        return batches

    def take_point(self, world: World, trained: TrainedModel, rows: Sequence[Marked], step: int, budget: int) -> None:
        """Measure z0 with the current weights.  Collective of the world."""
        self.point = 0.0

        def log_ratios(rows: Sequence[Any], batch: MicroBatch, output: OutputRows) -> Tensor:
            ratio_S = answer_logprobs(batch, output) - batch.extra["reference"]
            return torch.stack([torch.ones_like(ratio_S), ratio_S], -1)

        if mismatched := self.mismatched(rows):
            what = f"reference point of step {step}"
            moments = measure_rows(world, trained, mismatched, self.micro_batches, log_ratios, 2, budget, what)
            self.point = max(0.0, moments[2] / moments[1])

    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        reference_S, counts_S, sign_S = (batch.extra[name] for name in ("reference", "counts", "sign"))
        return row_columns(logp_S, reference_S, counts_S, sign_S, self.rule, self.point, self.noise)


class Heldout(HeldoutSchedule, Generic[RowT]):
    """Held-out rows of a run.  Collective of the world."""

    def __init__(
        self, config: HeldoutConfig, stop: EarlyStopConfig | None, task: Task[RowT], rows: Sequence[RowT], metrics: Sequence[str],
        world: World, take_point: TakePoint | None = None,
    ):  # fmt: skip
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
    world: World, trained: TrainedModel, rows: Sequence[RowT],
    micro_batches: Callable[[Sequence[RowT], int, torch.device], list[MicroBatch]], measure: Measure[RowT], width: int,
    budget: int, what: str,
) -> list[float]:  # fmt: skip
    """Moments of `measure`'s table (`width` columns), divided among replicas.  Collective of the world."""
    groups = trained.model.groups
    mine = rows[groups.dp_rank :: groups.dp]
    device, finish = next(trained.model.parameters()).device, partial(measure, mine)
    tables = forward_rows(trained.chunks, micro_batches(mine, budget, device), finish)
    table = torch.cat(tables).tolist() if groups.speaks and tables else []
    with waiting_for(what, world.activity):
        return sum_over_ranks(moments_of(table, width), world.device)
