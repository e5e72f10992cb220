"""The tasks of supervised training: rows as packed micro-batches, and their loss.

Legend: R completion tokens (or labelled steps) of a micro-batch, V vocabulary shard, S sequences: chosen, rejected, chosen, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import (
    next_token_loss,
    preference_loss,
    preference_table,
    step_loss,
    step_table,
)
from oppo_megatron.config.supervised import ProcessRewardModelConfig, SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, Pair, RowLoader, Steps
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import MicroBatch, pack_at, pack_responses, whole_sequences
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss
from oppo_megatron.mcore.vocab import VocabShards, likeliest_share, token_logprobs
from oppo_megatron.schedule.packing import pack_by_tokens
from oppo_megatron.train.heldout import Measure


class FineTuning:
    """Next-token prediction on completions; prompts are not trained on."""

    title = "sft"
    head: Head = "lm"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Completion]:
        """Rows of prompt and completion.  Raises DataError."""
        return RowLoader(config.data, tokenizer, config.max_tokens, quarantine).completions()

    def num_tokens(self, row: Completion) -> int:
        """The last token predicts nothing and is not read."""
        return len(row.prompt) + len(row.completion) - 1

    def micro_batches(self, rows: Sequence[Completion], budget: int, device: torch.device) -> list[MicroBatch]:
        """Packed rows, at most `budget` tokens together."""
        return pack_responses([row.prompt for row in rows], [row.completion for row in rows], budget, device)

    def loss(self, rows: Sequence[Completion], vocab: VocabShards) -> Loss:
        """Mean over the completion tokens of all `rows`."""
        num_tokens = sum(len(row.completion) for row in rows)

        def share(batch: MicroBatch, logits_RV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logp_R, _ = token_logprobs(logits_RV, batch.targets_R, vocab)
            return next_token_loss(logp_R, num_tokens)

        return share

    def measure(self, rows: Sequence[Completion], vocab: VocabShards) -> Measure:
        """For each row: its completion's tokens, the sum of their negative log-probs, and how many are the likeliest."""

        def table(batch: MicroBatch, logits_RV: Tensor) -> Tensor:
            logp_R, _ = token_logprobs(logits_RV, batch.targets_R, vocab)
            right_R = likeliest_share(logits_RV, batch.targets_R, vocab)
            columns_R3 = torch.stack([torch.ones_like(logp_R), -logp_R, right_R], -1).double()
            pieces = columns_R3.split([len(rows[i].completion) for i in batch.index])
            return torch.stack([piece.sum(0) for piece in pieces])

        return table


class RewardModelling:
    """The scalar at an answer's last token says how good the answer is."""

    title = "rm"
    head: Head = "scalar"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Pair]:
        """Rows of prompt, chosen and rejected answer.  Raises DataError."""
        return RowLoader(config.data, tokenizer, config.max_tokens, quarantine).pairs()

    def num_tokens(self, row: Pair) -> int:
        """The prompt is read twice, once with each answer."""
        return 2 * len(row.prompt) + len(row.chosen) + len(row.rejected)

    def micro_batches(self, rows: Sequence[Pair], budget: int, device: torch.device) -> list[MicroBatch]:
        """Packed pairs, at most `budget` tokens together; a pair that alone has more is a micro-batch of its own."""
        sequences = [([*row.prompt, *row.chosen], [*row.prompt, *row.rejected]) for row in rows]
        return [
            whole_sequences(index, [sequence for i in index for sequence in sequences[i]], device)
            for index in pack_by_tokens([self.num_tokens(row) for row in rows], budget)
        ]

    def loss(self, rows: Sequence[Pair], vocab: VocabShards) -> Loss:
        """Mean over all pairs of `rows`."""

        def share(batch: MicroBatch, scores_S: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return preference_loss(scores_S.view(-1, 2), len(rows))

        return share

    def measure(self, rows: Sequence[Pair], vocab: VocabShards) -> Measure:
        """For each pair: 1, its loss, whether the chosen answer scores higher, and by how much."""

        def table(batch: MicroBatch, scores_S: Tensor) -> Tensor:
            return preference_table(scores_S.view(-1, 2)).double()

        return table


class ProcessRewardModelling:
    """The scalar at a step's last token is the logit of the step being right."""

    title = "prm"
    head: Head = "scalar"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Steps]:
        """Rows of prompt, steps and labels.  Raises DataError, or ConfigError for a separator that no answer can have."""
        assert isinstance(config, ProcessRewardModelConfig)
        return RowLoader(config.data, tokenizer, config.max_tokens, quarantine).steps(config.separator)

    def num_tokens(self, row: Steps) -> int:
        """The whole row is read."""
        return len(row.prompt) + len(row.completion)

    def micro_batches(self, rows: Sequence[Steps], budget: int, device: torch.device) -> list[MicroBatch]:
        """Packed rows, at most `budget` tokens together, each wanted at its labelled ends; the labels are with them."""
        sequences = [[*row.prompt, *row.completion] for row in rows]
        batches = pack_at(sequences, [[len(row.prompt) + end for end in row.ends] for row in rows], budget, device)
        for batch in batches:
            labels = [label for i in batch.index for label in rows[i].labels]
            batch.extra["labels"] = on_device(labels, device, torch.float32)
        return batches

    def loss(self, rows: Sequence[Steps], vocab: VocabShards) -> Loss:
        """Mean over the labels of all `rows`."""
        num_labels = sum(len(row.labels) for row in rows)

        def share(batch: MicroBatch, logits_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return step_loss(logits_R, batch.extra["labels"], num_labels)

        return share

    def measure(self, rows: Sequence[Steps], vocab: VocabShards) -> Measure:
        """For each row: its labels, the sum of their losses, and how many are of the likelier class."""

        def table(batch: MicroBatch, logits_R: Tensor) -> Tensor:
            columns_R3 = step_table(logits_R, batch.extra["labels"]).double()
            pieces = columns_R3.split([len(rows[i].labels) for i in batch.index])
            return torch.stack([piece.sum(0) for piece in pieces])

        return table
