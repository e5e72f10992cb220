"""Preferences on the supervised loop: pairs (`oppo dpo`), and completions that are wanted or unwanted (`oppo kto`).

Legend: R answer tokens of a micro-batch, V vocabulary shard, S sequences; of pairs chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oppo_megatron.algorithms.decode_gap import token_noise
from oppo_megatron.algorithms.preference_losses import mean_loss, pair_columns, row_columns, sequence_sums, table_of
from oppo_megatron.cluster.world import World
from oppo_megatron.config.supervised import DPOConfig, KTOConfig, PreferenceConfig, SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Marked, Pair, RowLoader
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import Answered, MicroBatch, pack_together
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss, TrainedModel
from oppo_megatron.mcore.vocab import VocabShards, token_logprobs
from oppo_megatron.train.heldout import Measure, measure_rows
from oppo_megatron.train.preference.logprobs import LogprobTable

RowT = TypeVar("RowT", bound=tuple[list[int], ...])


class Preferences(ABC, Generic[RowT]):
    """Common part of both kinds: log-probs of answers, compared with log-probs of a reference."""

    title: str
    head: Head = "lm"

    def __init__(self) -> None:
        self.reference = LogprobTable()

    @abstractmethod
    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[RowT]: ...

    @abstractmethod
    def answers(self, row: RowT) -> Sequence[Answered]:
        """The prompt with each of the row's answers, in the order of the loss."""

    @abstractmethod
    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        """The loss and the figures of each row, given its answers' log-probs."""

    @property
    def has_mismatched(self) -> bool:
        """True if `mismatched` may return rows."""
        return False

    def mismatched(self, rows: Sequence[RowT]) -> Sequence[RowT]:
        """Rows that are read without gradient before training on the batch `rows`; most losses need none."""
        return ()

    def num_tokens(self, row: RowT) -> int:
        """The last token of an answer predicts nothing and is not read."""
        return sum(len(prompt) + len(answer) - 1 for prompt, answer in self.answers(row))

    def micro_batches(self, rows: Sequence[RowT], budget: int, device: torch.device) -> list[MicroBatch]:
        """Packed rows, at most `budget` tokens together; all answers of a row, which need each other, are in one."""
        answers = [self.answers(row) for row in rows]
        batches = pack_together(answers, budget, device)
        for batch in batches:
            known = [self.reference.of(*each) for i in batch.index for each in answers[i]]
            batch.extra["reference"] = on_device(known, device, torch.float64)
            batch.extra["counts"] = on_device(list(batch.counts), device, torch.float64)
        return batches

    def loss(self, rows: Sequence[RowT], vocab: VocabShards) -> Loss:
        """Mean over all `rows`: pairs, or completions."""

        def share(batch: MicroBatch, logits_RV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return mean_loss(self.columns(batch, answer_logprobs(batch, logits_RV, vocab)), len(rows))

        return share

    def measure(self, rows: Sequence[RowT], vocab: VocabShards) -> Measure:
        """For each row: 1, and the held-out metrics."""

        def table(batch: MicroBatch, logits_RV: Tensor) -> Tensor:
            return table_of(self.columns(batch, answer_logprobs(batch, logits_RV, vocab)), PreferenceConfig.METRICS)

        return table


class PairPreferences(Preferences[Pair]):
    """`oppo dpo`: the chosen answer is to gain on the rejected one, compared with the reference."""

    title = "dpo"

    def __init__(self, config: DPOConfig):
        super().__init__()
        self.rule, self.noise = config.dpo, token_noise(config.model.dtype)

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Pair]:
        """Rows of prompt, chosen and rejected answer.  Raises DataError."""
        return RowLoader(config.data, tokenizer, config.max_tokens, quarantine).unequal_pairs()

    def answers(self, row: Pair) -> Sequence[Answered]:
        return (row.prompt, row.chosen), (row.prompt, row.rejected)

    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        return pair_columns(logp_S, batch.extra["reference"], batch.extra["counts"], self.rule, self.noise)


class MarkedPreferences(Preferences[Marked]):
    """`oppo kto`: wanted completions are to gain on the reference point, unwanted ones to lose.

    `point` is z0 of the batch that is trained on, or measured; `ReferencePoint` sets it before.
    """

    title = "kto"

    def __init__(self, config: KTOConfig):
        super().__init__()
        self.rule, self.max_tokens = config.kto, config.max_tokens
        self.point, self.noise = 0.0, token_noise(config.model.dtype)

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Marked]:
        """Rows of prompt and completion with a label, or pairs as two rows each.  Raises DataError."""
        return RowLoader(config.data, tokenizer, config.max_tokens, quarantine).marked()

    def answers(self, row: Marked) -> Sequence[Answered]:
        return ((row.prompt, row.completion),)

    @property
    def has_mismatched(self) -> bool:
        return self.rule.loss == "kto"

    def mismatched(self, rows: Sequence[Marked]) -> Sequence[Marked]:
        """Return each prompt with the completion of the previous row with another prompt, cyclically.

        Rows that are too long are cut.  Empty if all rows have the same prompt.
        """
        if not self.has_mismatched or len({tuple(row.prompt) for row in rows}) < 2:
            return ()
        found = []
        for place, row in enumerate(rows):
            other = next(rows[place - back] for back in range(1, len(rows)) if rows[place - back].prompt != row.prompt)
            found.append(Marked(row.prompt, other.completion[: self.max_tokens - len(row.prompt)], [0]))
        return found

    def micro_batches(self, rows: Sequence[Marked], budget: int, device: torch.device) -> list[MicroBatch]:
        """Packed rows as of all preferences; `sign` is 1 for wanted rows and -1 for others."""
        batches = super().micro_batches(rows, budget, device)
        for batch in batches:
            signs = [1.0 if rows[i].wanted[0] else -1.0 for i in batch.index]
            batch.extra["sign"] = on_device(signs, device, torch.float64)
        return batches

    def columns(self, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        reference_S, counts_S, sign_S = (batch.extra[name] for name in ("reference", "counts", "sign"))
        return row_columns(logp_S, reference_S, counts_S, sign_S, self.rule, self.point, self.noise)


def answer_logprobs(batch: MicroBatch, logits_RV: Tensor, vocab: VocabShards) -> Tensor:
    """The log-prob of each answer [S] in float64, summed over its tokens."""
    logp_R, _ = token_logprobs(logits_RV, batch.targets_R, vocab)
    return sequence_sums(logp_R, batch.counts)


class ReferencePoint:
    """Sets the `point` of the task that it is given.  Every rank of the world makes the calls, with the same result."""

    def __init__(self, task: MarkedPreferences, world: World):
        self.task, self.world = task, world

    def take(self, trained: TrainedModel, rows: Sequence[Marked], step: int, budget: int) -> None:
        """Measure the point for the batch `rows` with the weights as they are."""
        mismatched = self.task.mismatched(rows)
        self.task.point = 0.0
        if mismatched:
            what = f"reference point of step {step}"
            moments = measure_rows(self.world, trained, mismatched, _Ratios(self.task), 2, budget, what)
            self.task.point = max(0.0, moments[2] / moments[1])


class _Ratios:
    """Measures the log-ratio of rows' answers."""

    def __init__(self, task: MarkedPreferences):
        self.micro_batches = task.micro_batches

    def measure(self, rows: Sequence[Marked], vocab: VocabShards) -> Measure:
        """1 and the log-ratio of each row."""

        def table(batch: MicroBatch, logits_RV: Tensor) -> Tensor:
            ratio_S = answer_logprobs(batch, logits_RV, vocab) - batch.extra["reference"]
            return torch.stack([torch.ones_like(ratio_S), ratio_S], -1)

        return table
