"""megatron-core's messages between pipeline stages, of micro-batches whose sizes every stage knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

NOTHING = [0, 0, 0]


class StageMessages(P2PCommunicator):
    """Does not ask a neighbour for the shape of what it is about to send, for which the host would wait in each message
    (p2p_communication.py:242): activations come in the order of the micro-batches, and gradients, too.
    """

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig, sizes: Sequence[int]):
        """`sizes`: tokens of each micro-batch."""
        super().__init__(group, config)
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[size // shards, 1, config.hidden_size] for size in sizes]
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes of what comes from the stage before, and from the one behind."""
        return (
            next(self._activations) if recv_prev else NOTHING,
            next(self._gradients) if recv_next else NOTHING,
        )
