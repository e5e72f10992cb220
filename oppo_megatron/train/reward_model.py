"""Reward modelling: chosen and rejected answers side by side in one micro-batch, and the Bradley-Terry loss.

Legend: P pairs of a micro-batch, S = 2P sequences: chosen, rejected, chosen, rejected, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import preference_loss, preference_table
from oppo_megatron.config.run import SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Pair, load_pairs
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import MicroBatch, whole_sequences
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss
from oppo_megatron.mcore.vocab_shards import VocabShards
from oppo_megatron.schedule.packing import pack_by_tokens
from oppo_megatron.train.heldout_rows import Measure


class RewardModelling:
    """The scalar at an answer's last token says how good the answer is."""

    title = "rm"
    head: Head = "scalar"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Pair]:
        """Rows of prompt, chosen and rejected answer.  Raises DataError."""
        return load_pairs(
            config.data, tokenizer, max_tokens=config.max_tokens, long_rows=config.data.long_rows, quarantine=quarantine
        )

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
