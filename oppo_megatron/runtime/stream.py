"""The token stream between the actor's ranks and the scorers' ranks, and the way back for what the scorers found.

    actor ranks                                   scorer ranks
    output rank  --- chunk (isend) -------------> first rank --- broadcast ---> all scorer ranks
    all          <-- outputs, stats (broadcast from the rank that has them) --- each role's output rank

In a single process both ends are the same rank and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.records import Chunk, Rollout
from oppo_megatron.runtime.chunk_codec import HEADER_SIZE, ChunkDecoder, ChunkEncoder


@dataclass(frozen=True)
class StreamGroups:
    """Groups of the stream.  `link` joins the actor's output rank and the scorers' first rank."""

    link: dist.ProcessGroup | None
    scorers: dist.ProcessGroup | None
    source: int
    sink: int


def build_stream_groups(source: int, scorer_ranks: list[int]) -> StreamGroups:
    """Every rank of the world makes the call, in the same place.  `source` is the actor's output rank."""
    sink = scorer_ranks[0]
    link = None if source == sink else dist.new_group([source, sink], group_desc="stream.link")
    return StreamGroups(link, dist.new_group(scorer_ranks, group_desc="stream.scorers"), source, sink)


@dataclass
class TokenStream:
    """This rank's end of the stream.

    `sends` is true on the actor's output rank (where the scorers are other ranks); the other actor ranks have the same chunks
    and keep them.  Scorer ranks call `receive`.  Sends are asynchronous; `drain` waits for those under way.
    """

    groups: StreamGroups
    sends: bool
    device: torch.device
    encoder: ChunkEncoder = field(default_factory=ChunkEncoder)
    decoder: ChunkDecoder = field(default_factory=ChunkDecoder)
    _pending: list[tuple[Any, Tensor]] = field(default_factory=list)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """New sequences, known at both ends."""
        for rollout in rollouts:
            for books in (self.encoder, self.decoder):
                books.open(rollout.seq_id, rollout.prompt.tokens)

    def retire(self, rollouts: Sequence[Rollout]) -> None:
        """Sequences that have been trained."""
        for rollout in rollouts:
            for books in (self.encoder, self.decoder):
                books.close(rollout.seq_id)

    def send(self, chunk: Chunk) -> None:
        """Start sending a chunk to the scorers."""
        for words in self.encoder.encode(chunk):
            tensor = torch.from_numpy(words).to(self.device)
            self._pending.append((dist.isend(tensor, self.groups.sink, group=self.groups.link), tensor))

    def receive(self) -> Chunk:
        """Wait for the next chunk.  Raises StreamError if it is not the next one, whole."""
        header = self._words(HEADER_SIZE)
        return self.decoder.decode(header, self._words(self.decoder.payload_size(header)))

    def drain(self) -> None:
        """Wait until every chunk has left, so that its buffer may go."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _words(self, size: int) -> np.ndarray:
        words = torch.empty(size, dtype=torch.int64, device=self.device)
        if dist.get_rank() == self.groups.sink:
            dist.recv(words, self.groups.source, group=self.groups.link)
        if self.groups.scorers is not None and self.groups.scorers.size() > 1:
            dist.broadcast(words, self.groups.sink, group=self.groups.scorers)
        return words.cpu().numpy()


def share(values: Tensor | None, size: int, source: int, device: torch.device) -> Tensor:
    """A vector of `size` numbers from rank `source` to every rank of the world, in float64."""
    vector = torch.empty(size, dtype=torch.float64, device=device)
    if dist.get_rank() == source:
        assert values is not None and values.numel() == size
        vector.copy_(values)
    if dist.get_world_size() > 1:
        dist.broadcast(vector, source)
    return vector
