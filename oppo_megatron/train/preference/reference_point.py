"""KTO's reference point z0: how much likelier than under the reference answers to other prompts are, over a whole batch.

z0 = max(0, mean over mismatched rows of log pi - log pi_ref), without gradient.  All replicas share the rows, so neither
micro-batches nor the layout have an influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.cluster.world import World
from oppo_megatron.data.supervised_rows import Marked
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.vocab_shards import VocabShards
from oppo_megatron.train.heldout_rows import Measure, measure_rows
from oppo_megatron.train.preference.tasks import MarkedPreferences, answer_logprobs


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
