"""The actor as the trainer sees it: the user's model, whose `infer` takes rows from a pool.

Legend: b rollout micro-batch, S positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.control.chunk_tuner import DecodeLaw
from oppo_megatron.errors import DataError
from oppo_megatron.integrations.nemo_aligner.pool import Pool, Row, Wave
from oppo_megatron.integrations.nemo_aligner.watched_decode import Decoded, Decoder
from oppo_megatron.rewards.streaming import ScorerStream

KEY = "oppo_row"
"""A row's name in a rollout batch, which it is carried through by the trainer: int64 [b]."""


@dataclass
class Effort:
    """What the waves of a step took: calls' positions x rows, tokens drawn, seconds."""

    places: int = 0
    positions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    trained_tokens: int = 0
    stale_tokens: int = 0
    law: DecodeLaw = field(default_factory=DecodeLaw)

    def add(self, positions: int, rows: int, tokens: int, seconds: float) -> None:
        """A call is over."""
        self.places += positions * rows
        self.positions += positions
        self.tokens += tokens
        self.seconds += seconds
        self.law.add(positions, tokens, seconds)


class PooledActor:
    """Stands for the model: everything else is the model's own.  `draw` > batch, or a pool with rows, makes a step pooled.

    `stream` is fed every `chunk` positions, on the ranks that have one.
    """

    def __init__(self, model: Any, pool: Pool, stream: ScorerStream | None):
        self._model, self.pool, self._stream = model, pool, stream
        self._decoder = Decoder(model)
        self.pooled, self.chunk, self.policy = False, 1, 0
        self.effort = Effort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """NeMo-Aligner's rollout of b rows: of the batch, or the next b of the pool to finish."""
        return self._infer_pooled(int(batch["count"])) if self.pooled else self._infer_batch(batch)

    @torch.no_grad()
    def _infer_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        texts, lengths = batch["text"], batch["length"]
        keys = self.pool.new_keys(len(lengths))
        rows = [Row(key, text[:n].tolist()) for key, text, n in zip(keys, texts, lengths.tolist(), strict=True)]
        decoded = self._decode(Wave(rows, 0, frozenset()), texts, lengths, never_stop=True)
        return self._rollout(rows, decoded.tokens_bS, decoded.lengths_b)

    @torch.no_grad()
    def _infer_pooled(self, count: int) -> dict[str, Tensor]:
        while self.pool.num_ready < count:
            wave = self.pool.next_wave()
            contexts = [row.context for row in wave.rows]
            texts = self._decoder.padded(contexts, max(self._decoder.limit(len(row.prompt)) for row in wave.rows))
            decoded = self._decode(wave, texts, torch.tensor([len(context) for context in contexts]))
            self.pool.decoded(wave, decoded.lengths_b.tolist())
        rows = self.pool.take(count)
        width = max(len(row.context) for row in rows)
        tokens = self._decoder.padded([row.context for row in rows], width).to(torch.cuda.current_device())
        return self._rollout(rows, tokens, torch.tensor([len(row.context) for row in rows], device=tokens.device))

    def _decode(self, wave: Wave, texts: Tensor, contexts: Tensor, never_stop: bool = False) -> Decoded:
        """Decode the wave and let its rows grow."""
        started, begin = time.monotonic(), int(contexts.min())
        limits = [self._decoder.limit(len(row.prompt)) for row in wave.rows]
        carried = any(row.tokens for row in wave.rows)
        watch = self._watch(wave, limits, contexts.tolist(), never_stop)
        decoded = self._decoder.decode(texts, contexts, torch.tensor(limits), watch, carried=carried)
        drawn = 0
        for row, tokens, length, ended, limit in zip(
            wave.rows, decoded.tokens_bS.tolist(), decoded.lengths_b.tolist(), decoded.ended_b.tolist(), limits, strict=True
        ):  # fmt: skip
            length = max(length, len(row.context))  # a call may end before it comes to the row's own context
            drawn += length - len(row.context)
            row.grow(tokens[len(row.prompt) : length], self.policy, ended or length >= limit)
        self._feed(wave.rows)
        positions = decoded.tokens_bS.size(1) - begin
        self.effort.add(positions, len(wave.rows), drawn, time.monotonic() - started)
        return decoded

    def _watch(
        self, wave: Wave, limits: Sequence[int], contexts: Sequence[int], never_stop: bool
    ) -> Callable[[Tensor, Tensor], bool]:
        least = self._decoder.min_new
        due = min(contexts) + self.chunk

        def watch(tokens_bS: Tensor, ends_b: Tensor) -> bool:
            nonlocal due
            end = tokens_bS.size(1)
            ends = None
            if self._stream is not None and end >= due:
                due, ends = end + self.chunk, ends_b.tolist()
                self._feed_running(wave.rows, tokens_bS, ends, contexts)
            if never_stop:
                return False
            ends = ends_b.tolist() if ends is None else ends
            running = [i for i, limit in enumerate(limits) if ends[i] < 0 and end < limit]
            ripe = all(wave.rows[i].tokens or end - contexts[i] >= max(1, least) for i in running)
            return ripe and wave.enough(running)

        return watch

    def _feed_running(
        self, rows: Sequence[Row], tokens_bS: Tensor, ends: Sequence[int], contexts: Sequence[int]
    ) -> None:
        """Hand the scorer what rows have by now; their last token waits, so that the last piece is never empty."""
        assert self._stream is not None
        for row, tokens, end, context in zip(rows, tokens_bS.tolist(), ends, contexts, strict=True):
            if end < 0:
                self._stream.offer(row.key, tokens[: max(context, len(tokens)) - 1], final=False)

    def _feed(self, rows: Iterable[Row]) -> None:
        """What rows have at the end of a call; a finished row's last piece asks for its score."""
        if self._stream is None:
            return
        for row in rows:
            context = row.context
            self._stream.offer(row.key, context if row.finished else context[:-1], final=row.finished)

    def _rollout(self, rows: Sequence[Row], tokens_bS: Tensor, lengths_b: Tensor) -> dict[str, Tensor]:
        self.effort.trained_tokens += sum(len(row.tokens) for row in rows)
        self.effort.stale_tokens += sum(row.stale_tokens(self.policy) for row in rows)
        return {
            "response_tokens": tokens_bS,
            "response_lengths": lengths_b,
            "prompt_lengths": torch.tensor([len(row.prompt) for row in rows], device=tokens_bS.device),
            "is_end": self._decoder.validity(tokens_bS, lengths_b),
            KEY: torch.tensor([row.key for row in rows], device=tokens_bS.device),
        }


@dataclass(frozen=True)
class PoolBatches:
    """The batch iterator of a pooled step: draws what the pool lacks, then asks for b rows `num_microbatches` times.

    The sampler begins behind the trained rows, so the pool's rows are skipped: drawn = consumed + pool.
    """

    actor: PooledActor
    draw: int
    sampler_iter: Iterator[Sequence[int]]
    num_microbatches: int
    dataset: Any
    collate_fn: Callable[[list[Any]], Mapping[str, Tensor]]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pool = self.actor.pool
        first = next(self.sampler_iter, None)
        if first is None:
            raise DataError(
                "the sampler gives no prompt where an epoch's are left; let num_rollout_samples divide the data"
            )
        micro = len(first)
        batch = micro * self.num_microbatches
        ids = list(islice(chain.from_iterable(chain([first], self.sampler_iter)), len(pool), len(pool) + self.draw))
        if len(pool) + len(ids) < batch:
            raise DataError(
                f"the sampler ends after {len(ids)} of {self.draw} prompts; let num_rollout_samples and "
                "rollout_micro_batch_size divide the data"
            )
        if ids:
            drawn = self.collate_fn([self.dataset[index] for index in ids])
            pool.admit([t[:n].tolist() for t, n in zip(drawn["text"], drawn["length"].tolist(), strict=True)])
        pool.begin(batch, micro)
        for _ in range(self.num_microbatches):
            yield {"count": torch.tensor(micro)}
        pool.end()
