"""Applies a round's plan to the cache of one role on this rank: slots that close and open, and prompts that fork."""

from __future__ import annotations

from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.rounds import Batch, Forks


class TakenUp:
    """Closes and opens slots, and forks prompts that are cached already; `prefilled` forks the others."""

    def __init__(self, cache: SequenceCache, work: ReplicaWork):
        self._cache, self._forks = cache, Forks(work.fork)
        for seq_id in work.evict:
            cache.close(seq_id)
        for seq_id in work.open:
            cache.open(seq_id)
        for fork in work.fork:  # a plan for another state would fork other tokens
            held = cache.length(fork.source)
            assert held == fork.held, f"sequence {fork.source} has {held} tokens cached, but {fork.held} are planned"
        for source in self._forks.sources:
            self._make(source)

    def check(self, batch: Batch) -> None:
        """Assert that the cache has what the plan says: otherwise other tokens would be computed."""
        for growth in batch:
            held = self._cache.length(growth.seq_id)
            assert held == growth.past, (
                f"sequence {growth.seq_id} has {held} tokens cached, but {growth.past} are planned"
            )

    def prefilled(self, batch: Batch) -> None:
        """Fork prompts of a micro-batch that is now in the cache."""
        for growth in batch if self._forks.sources else ():
            self._make(growth.seq_id)

    def _make(self, source: int) -> None:
        forks = self._forks.due(source, self._cache.length(source))
        for tokens in sorted({fork.tokens for fork in forks}):
            self._cache.fork(source, [fork.target for fork in forks if fork.tokens == tokens], tokens)
