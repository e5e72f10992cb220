"""Supervised fine-tuning: completions as packed micro-batches, and their next-token loss.

Legend: R completion tokens of a micro-batch, V vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import next_token_loss
from oppo_megatron.config.run import SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, load_completions
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import MicroBatch, pack_responses
from oppo_megatron.mcore.layers.vocab_parallel import likeliest_share, token_logprobs
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss
from oppo_megatron.mcore.vocab_shards import VocabShards
from oppo_megatron.train.heldout_rows import Measure


class FineTuning:
    """Next-token prediction on completions; prompts are read, not learned."""

    title = "sft"
    head: Head = "lm"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Completion]:
        """Rows of prompt and completion.  Raises DataError."""
        return load_completions(
            config.data, tokenizer, max_tokens=config.max_tokens, long_rows=config.data.long_rows, quarantine=quarantine
        )

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
