"""The actor as the trainer sees it: the user's model, whose `infer` takes rows from a pool.

Legend: b rollout micro-batch, S positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.control.chunk_tuner import DecodeLaw
from oppo_megatron.errors import DataError
from oppo_megatron.integrations.nemo_aligner.feed import Feed
from oppo_megatron.integrations.nemo_aligner.pool import Pool, Wave
from oppo_megatron.integrations.nemo_aligner.watched_decode import Decoder, Watch, watched

KEY = "oppo_row"
"""A row's name in a rollout whose rewards are streamed, on its way from `infer` to `infer_rm_critic`: int64 [b]."""


@dataclass
class Effort:
    """Cost of a step's waves: calls' positions x rows, tokens drawn, seconds."""

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
    """Stands for the model: everything else is the model's own.

    In a step that is `pooled`, rows come from the pool; else by the model's own `infer`.  `feed` is offered them every `chunk`
    positions; None: rewards are not streamed.  `measured`: note the effort.
    """

    def __init__(self, model: Any, pool: Pool, feed: Feed | None):
        self._model, self.pool, self._feed = model, pool, feed
        self._decoder = Decoder(model)
        self.pooled, self.measured, self.chunk, self.policy = False, False, 1, 0
        self.effort = Effort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """NeMo-Aligner's rollout of b rows: of the batch, or the next b of the pool to finish."""
        return self._infer_pooled(int(batch["count"])) if self.pooled else self._infer_batch(batch)

    @torch.no_grad()
    def _infer_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's own, whatever generates there."""
        started = time.monotonic()
        keys = [] if self._feed is None else self.pool.new_keys(len(batch["length"]))
        with self._shown(keys, batch):
            rollout: dict[str, Tensor] = self._model.infer(batch)
        if self.measured:
            tokens_bS, prompts_b = rollout["response_tokens"], rollout["prompt_lengths"]
            drawn = int((rollout["response_lengths"] - prompts_b).sum())
            self.effort.add(tokens_bS.size(1) - int(prompts_b.min()), len(tokens_bS), drawn, time.monotonic() - started)
            self.effort.trained_tokens += drawn
        if self._feed is not None:
            if len(keys) != len(rollout["response_lengths"]):  # several answers to a prompt, or none to some
                self._feed.forget(keys)
                keys = self.pool.new_keys(len(rollout["response_lengths"]))
            rows = zip(keys, rollout["response_tokens"].tolist(), rollout["response_lengths"].tolist(), strict=True)
            for key, tokens, length in rows:
                self._feed.offer(key, tokens[:length], final=True)
            rollout[KEY] = torch.tensor(keys, device=rollout["response_tokens"].device)
        return rollout

    def _shown(self, keys: Sequence[int], batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Within it, the feed is offered what the model's own `infer` draws, if it generates position by position."""
        if self._feed is None or not self._feed.is_open:
            return nullcontext()
        prompts = batch["length"].tolist()
        offer = self._offers(keys, [self._decoder.limit(length) for length in prompts], prompts)

        def watch(tokens_bS: Tensor, ends_b: Tensor) -> bool:
            offer(tokens_bS, ends_b)
            return False

        return watched(self._model, (batch["text"], batch["length"]), watch)

    @torch.no_grad()
    def _infer_pooled(self, count: int) -> dict[str, Tensor]:
        while self.pool.num_ready < count:
            self._decode(self.pool.next_wave())
        rows = self.pool.take(count)
        width = max(len(row.context) for row in rows)
        tokens_bS = self._decoder.padded([row.context for row in rows], width).to(torch.cuda.current_device())
        lengths_b = torch.tensor([len(row.context) for row in rows], device=tokens_bS.device)
        self.effort.trained_tokens += sum(len(row.tokens) for row in rows)
        self.effort.stale_tokens += sum(row.stale_tokens(self.policy) for row in rows)
        rollout = {
            "response_tokens": tokens_bS,
            "response_lengths": lengths_b,
            "prompt_lengths": torch.tensor([len(row.prompt) for row in rows], device=tokens_bS.device),
            "is_end": self._decoder.validity(tokens_bS, lengths_b),
        }
        if self._feed is not None:
            rollout[KEY] = torch.tensor([row.key for row in rows], device=tokens_bS.device)
        return rollout

    def _decode(self, wave: Wave) -> None:
        """Decode the wave and let its rows grow."""
        started = time.monotonic()
        contexts = [len(row.context) for row in wave.rows]
        limits = [self._decoder.limit(len(row.prompt)) for row in wave.rows]
        texts = self._decoder.padded([row.context for row in wave.rows], max(limits))
        carried = any(row.tokens for row in wave.rows)
        watch = self._watch(wave, limits, contexts)
        decoded = self._decoder.decode(texts, torch.tensor(contexts), torch.tensor(limits), watch, carried=carried)
        drawn = 0
        ends = decoded.lengths_b.tolist()
        for row, tokens, length, ended, limit, context in zip(
            wave.rows, decoded.tokens_bS.tolist(), ends, decoded.ended_b.tolist(), limits, contexts, strict=True
        ):  # fmt: skip
            drawn += length - context
            row.grow(tokens[len(row.prompt) : length], self.policy, ended or length >= limit)
            if self._feed is not None:  # the last token of an unfinished row waits: no last piece is empty
                self._feed.offer(row.key, tokens[: length if row.finished else length - 1], final=row.finished)
        positions = decoded.tokens_bS.size(1) - min(contexts)
        self.effort.add(positions, len(wave.rows), drawn, time.monotonic() - started)
        self.pool.decoded(wave, ends)

    def _watch(self, wave: Wave, limits: Sequence[int], contexts: Sequence[int]) -> Watch:
        """Feeds the scorer, and ends the wave where few enough of its rows run.

        Not before all of its rows have begun: NeMo goes on until then, and fills those that have been stopped with its end.
        """
        least = max(1, self._decoder.min_new)
        offer = self._offers([row.key for row in wave.rows], limits, contexts)

        def watch(tokens_bS: Tensor, ends_b: Tensor) -> bool:
            offer(tokens_bS, ends_b)
            end, ends = tokens_bS.size(1), ends_b.tolist()
            running = [i for i, limit in enumerate(limits) if ends[i] < 0 and end < limit]
            begun = end > max(contexts)
            ripe = begun and all(wave.rows[i].tokens or end - contexts[i] >= least for i in running)
            return ripe and wave.enough(running)

        return watch

    def _offers(
        self, keys: Sequence[int], limits: Sequence[int], contexts: Sequence[int]
    ) -> Callable[[Tensor, Tensor], None]:
        """Offers the feed, once in a chunk, what rows have by then: (tokens so far [b, S], ends [b]).

        A row that has ended asks for its score.  A running row is offered up to its `limits` tokens only: what NeMo
        draws after them, while others run, is part of it only if it ends there.  The last token waits, so that the last piece
        is never empty.
        """
        feed, due = self._feed, min(contexts) + self.chunk

        def offer(tokens_bS: Tensor, ends_b: Tensor) -> None:
            nonlocal due
            if feed is None or not feed.is_open or tokens_bS.size(1) < due:
                return
            due = tokens_bS.size(1) + self.chunk
            for key, tokens, end, limit in zip(keys, tokens_bS.tolist(), ends_b.tolist(), limits, strict=True):
                ended = end >= 0
                feed.offer(key, tokens[: end + 1 if ended else min(len(tokens), limit) - 1], final=ended)

        return offer


@dataclass(frozen=True)
class PoolBatches:
    """The batch iterator of a pooled step: asks for b rows `num_microbatches` times, of a pool that has been filled."""

    pool: Pool
    micro: int
    num_microbatches: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.pool.begin(self.micro * self.num_microbatches, self.micro)
        for _ in range(self.num_microbatches):
            yield {"count": torch.tensor(self.micro)}
        self.pool.end()


def fill(
    pool: Pool,
    draw: int,
    sampler_iter: Iterator[Sequence[int]],
    num_microbatches: int,
    dataset: Any,
    collate_fn: Callable[[list[Any]], Mapping[str, Tensor]],
) -> PoolBatches:
    """Draw `draw` prompts for the pool.  Raises DataError if the sampler has fewer.

    The sampler begins after the trained rows, so the pool's rows are skipped: drawn = consumed + pool.
    """
    first = next(sampler_iter, None)
    if first is None:
        raise DataError(
            "the sampler gives no prompt where an epoch's are left; let num_rollout_samples divide the data"
        )
    ids = list(islice(chain.from_iterable(chain([first], sampler_iter)), len(pool), len(pool) + draw))
    if len(pool) + len(ids) < len(first) * num_microbatches:
        raise DataError(
            f"the sampler ends after {len(ids)} of {draw} prompts; let num_rollout_samples and "
            "rollout_micro_batch_size divide the data"
        )
    if ids:
        drawn = collate_fn([dataset[index] for index in ids])
        pool.admit([t[:n].tolist() for t, n in zip(drawn["text"], drawn["length"].tolist(), strict=True)])
    return PoolBatches(pool, len(first), num_microbatches)
