"""The token stream from the actor to the ranks without it, and the scorers' results back.

    ranks of the actor  --- chunk (isend to each) --->  listening ranks, some of which pass it on  (`Site.feeds`)
    every rank          <-- outputs, stats (broadcast from the rank that has them)

If every rank holds the actor, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.chunks import Chunk
from oppo_megatron.engine.chunk_codec import HEADER_SIZE, ChunkDecoder, ChunkEncoder
from oppo_megatron.mcore.host_copies import on_device
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action


class ChunkOutlet:
    """The sending end, on each rank of the actor that sends chunks: all encode the same message."""

    def __init__(self, device: torch.device):
        self.device, self._encoder = device, ChunkEncoder()
        self._encoded: tuple[Chunk, list[Tensor]] | None = None

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """New sequences, known at both ends."""
        for rollout in rollouts:
            self._encoder.open(rollout.seq_id, rollout.prompt.tokens, rollout.tokens)

    def retire(self, rollouts: Sequence[Rollout]) -> None:
        """Sequences that have been trained."""
        for rollout in rollouts:
            self._encoder.close(rollout.seq_id)

    def message(self, chunk: Chunk) -> list[Tensor]:
        """Header and payload; encoded once for all listeners."""
        if self._encoded is None or self._encoded[0] is not chunk:
            words = self._encoder.encode(chunk)
            self._encoded = chunk, [on_device(torch.from_numpy(part), self.device) for part in words if len(part)]
        return self._encoded[1]


class ListenWorker:
    """The receiving end on a rank without the actor; it may forward messages."""

    def __init__(self, device: torch.device):
        self.device, self._decoder = device, ChunkDecoder()
        self._chunk: Chunk | None = None
        self._received: list[Tensor] = []

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """New sequences, known at both ends."""
        for rollout in rollouts:
            self._decoder.open(rollout.seq_id, rollout.prompt.tokens, rollout.tokens)

    def retire(self, rollouts: Sequence[Rollout]) -> None:
        """Sequences that have been trained."""
        for rollout in rollouts:
            self._decoder.close(rollout.seq_id)

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        raise AssertionError(f"{action}: this rank does not hold the actor")

    def outbox(self, action: Action) -> Sequence[Tensor]:
        """The round's message as received."""
        assert self._received, f"{action}: no chunk has come"
        return self._received

    def inbox(self, action: Action) -> Iterator[Tensor]:
        """Header, then payload.  Raises StreamError if the chunk is not the next one, whole."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.device)
        yield header
        words = header.cpu().numpy()
        payload = torch.empty(self._decoder.payload_size(words), dtype=torch.int64, device=self.device)
        if payload.numel():
            yield payload
        self._received = [header, payload] if payload.numel() else [header]
        self._chunk = self._decoder.decode(words, payload.cpu().numpy())

    def end(self) -> Chunk:
        """The round's chunk."""
        assert self._chunk is not None
        chunk, self._chunk, self._received = self._chunk, None, []
        return chunk


def share(values: Tensor | None, size: int, source: int, device: torch.device) -> Tensor:
    """Broadcast a vector of `size` float64 numbers from rank `source` to the world."""
    vector = torch.empty(size, dtype=torch.float64, device=device)
    if dist.get_rank() == source:
        assert values is not None and values.numel() == size
        vector.copy_(on_device(values, device))
    if dist.get_world_size() > 1:
        dist.broadcast(vector, source)
    return vector
