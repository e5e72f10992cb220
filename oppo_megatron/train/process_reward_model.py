"""Process reward modelling: whole answers as packed micro-batches, and the cross-entropy at the ends of their steps.

Legend: R labelled steps of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import step_loss, step_table
from oppo_megatron.config.run import ProcessRewardModelConfig, SupervisedConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Steps, load_steps
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.batch import MicroBatch, pack_at
from oppo_megatron.mcore.host_copies import on_device
from oppo_megatron.mcore.model import Head
from oppo_megatron.mcore.training import Loss
from oppo_megatron.mcore.vocab_shards import VocabShards
from oppo_megatron.train.heldout_rows import Measure


class ProcessRewardModelling:
    """The scalar at a step's last token is the logit of the step's being right."""

    title = "prm"
    head: Head = "scalar"

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[Steps]:
        """Rows of prompt, steps and labels.  Raises DataError, or ConfigError for a separator that no answer can have."""
        assert isinstance(config, ProcessRewardModelConfig)
        return load_steps(
            config.data,
            tokenizer,
            separator=config.separator,
            max_tokens=config.max_tokens,
            long_rows=config.data.long_rows,
            quarantine=quarantine,
        )

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
