"""The user's actor with an `infer` that decodes rows of a pool by NeMo's generation. Legend: b rows, S positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from nemo.collections.nlp.modules.common.text_generation_strategy import GPTModelTextGenerationStrategy
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.distributed import broadcast_2d_tensor_within_pp
from nemo_aligner.utils.text_generation_utils import verify_is_valid_and_clamp_range_
from omegaconf import OmegaConf
from torch import Tensor

from oppo_megatron.control.chunk_tuner import DecodeLaw
from oppo_megatron.errors import DataError
from oppo_megatron.integrations.nemo_aligner.pool import Pool, Wave
from oppo_megatron.integrations.nemo_aligner.rewarding import KEY, Feed

Watch = Callable[[Tensor, Tensor], bool]
"""(tokens [b, S], end positions [b], -1 while running) -> True to stop."""


def plain(tree: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


class WatchedStrategy:
    """Shows `watch` every position."""

    def __init__(self, strategy: Any, context_lengths_b: Tensor, watch: Watch):
        self._strategy, self._context_lengths_b, self._watch = strategy, context_lengths_b, watch
        self.ends_b = torch.full_like(context_lengths_b, -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def end_of_generation_condition(self, tokens: Tensor, prev: Tensor, eod_id: int, end_strings: list[str]) -> Tensor:
        is_end_b: Tensor = self._strategy.end_of_generation_condition(tokens, prev, eod_id, end_strings)
        position = tokens.size(1) - 1
        first_end_b = (self._context_lengths_b <= position) & is_end_b & (self.ends_b < 0)
        self.ends_b = torch.where(first_end_b, position, self.ends_b)
        return torch.ones_like(is_end_b) if self._watch(tokens, self.ends_b) else is_end_b


@contextmanager
def watched(model: Any, inputs: tuple[Tensor, Tensor], watch: Watch) -> Iterator[None]:
    """Show `watch` what `infer` generates from `inputs` [b, S], [b]."""
    generate, own = model.generate, vars(model).get("generate")

    def shown(*args: Any, **kwargs: Any) -> Any:
        strategy: Any = kwargs.get("strategy")
        given: Any = kwargs.get("inputs", args[0] if args else None)
        if strategy is not None and _equal(given, inputs):
            kwargs["strategy"] = WatchedStrategy(strategy, given[1], watch)
        return generate(*args, **kwargs)

    model.generate = shown
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


def _equal(given: Any, inputs: tuple[Tensor, Tensor]) -> bool:
    if not isinstance(given, tuple | list) or len(given) != len(inputs):
        return False
    pairs = zip(given, inputs, strict=True)
    return all(isinstance(one, Tensor) and torch.equal(one, other.to(one.device)) for one, other in pairs)


class Decoder:
    def __init__(self, model: Any):
        ppo = model.cfg.ppo
        self.model = model
        self._lengths = plain(ppo.length_params)
        self._sampling = plain(ppo.sampling_params)
        self.max_new: int = self._lengths["max_length"]
        self.min_new: int = self._lengths["min_length"]
        learned = model.cfg.get("position_embedding_type", "learned_absolute") == "learned_absolute"
        self._longest = model.cfg.encoder_seq_length + 1 if learned else None

    def limit(self, prompt_length: int) -> int:
        """Most tokens of prompt and response."""
        limit = prompt_length + self.max_new
        return limit if self._longest is None else min(limit, self._longest)

    def decode(
        self, texts_bS: Tensor, contexts_b: Tensor, limits_b: Tensor, watch: Watch, carried: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continue rows to their end, `limits_b` or `watch`; return tokens [b, S], lengths [b], ended by itself [b]."""
        device = torch.cuda.current_device()
        texts_bS, contexts_b, limits_b = (t.to(device) for t in (texts_bS, contexts_b, limits_b))
        strategy = WatchedStrategy(GPTModelTextGenerationStrategy(self.model), contexts_b, watch)
        steps = int(limits_b.max() - contexts_b.max())
        output = self.model.generate(
            inputs=(texts_bS, contexts_b),
            length_params={**self._lengths, "max_length": steps, "min_length": 0 if carried else self.min_new},
            sampling_params=self._sampling,
            strategy=strategy,
        )
        tokens_bS = torch.tensor(output["token_ids"], dtype=torch.long, device=device) if output else None
        tokens_bS = broadcast_2d_tensor_within_pp(tokens_bS, dtype=torch.long)
        ends = strategy.ends_b.view(-1, 1) if parallel_state.is_pipeline_last_stage() else None
        ends_b = broadcast_2d_tensor_within_pp(ends, dtype=torch.long).flatten()
        last_b = limits_b.clamp(max=tokens_bS.size(1))
        return tokens_bS, torch.where(ends_b >= 0, ends_b + 1, last_b), ends_b >= 0

    def validity(self, tokens_bS: Tensor, lengths_b: Tensor) -> Tensor:
        """NeMo-Aligner's `is_end` [b].  Clamps ids beyond the vocabulary in place."""
        strategy = GPTModelTextGenerationStrategy(self.model)
        end_strings = self.model.cfg.ppo.sampling_params["end_strings"]
        valid_b: Tensor = verify_is_valid_and_clamp_range_(tokens_bS, lengths_b, strategy, self.model.tokenizer, end_strings)
        return valid_b

    def padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        text = torch.full((len(rows), width), self.model.tokenizer.eos_id, dtype=torch.long)
        for i, row in enumerate(rows):
            text[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        return text


@dataclass
class Effort:
    """`places`: positions x rows."""

    places: int = 0
    positions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    trained_tokens: int = 0
    stale_tokens: int = 0
    law: DecodeLaw = field(default_factory=DecodeLaw)

    def add(self, positions: int, rows: int, tokens: int, seconds: float) -> None:
        self.places += positions * rows
        self.positions += positions
        self.tokens += tokens
        self.seconds += seconds
        self.law.add(positions, tokens, seconds)


class PooledActor:
    """`feed` gets rows every `chunk` positions."""

    def __init__(self, model: Any, pool: Pool, feed: Feed | None):
        self._model, self.pool, self._feed = model, pool, feed
        self._decoder = Decoder(model)
        self.pooled, self.measured, self.chunk, self.policy = False, False, 1, 0
        self.effort = Effort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Roll out the batch, or b rows of the pool."""
        return self._infer_pooled(int(batch["count"])) if self.pooled else self._infer_batch(batch)

    @torch.no_grad()
    def _infer_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
                self._feed.put(key, tokens[:length], final=True)
            rollout[KEY] = torch.tensor(keys, device=rollout["response_tokens"].device)
        return rollout

    def _shown(self, keys: Sequence[int], batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        if self._feed is None or not self._feed.is_open:
            return nullcontext()
        prompts = batch["length"].tolist()
        send = self._sender(keys, [self._decoder.limit(length) for length in prompts], prompts)

        def watch(tokens_bS: Tensor, ends_b: Tensor) -> bool:
            send(tokens_bS, ends_b)
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
        started = time.monotonic()
        contexts = [len(row.context) for row in wave.rows]
        limits = [self._decoder.limit(len(row.prompt)) for row in wave.rows]
        texts = self._decoder.padded([row.context for row in wave.rows], max(limits))
        carried = any(row.tokens for row in wave.rows)
        watch = self._watch(wave, limits, contexts)
        tokens_bS, lengths_b, ended_b = self._decoder.decode(texts, torch.tensor(contexts), torch.tensor(limits), watch, carried)
        drawn, ends = 0, lengths_b.tolist()
        for row, tokens, length, ended, limit, context in zip(
            wave.rows, tokens_bS.tolist(), ends, ended_b.tolist(), limits, contexts, strict=True
        ):
            drawn += length - context
            row.grow(tokens[len(row.prompt) : length], self.policy, ended or length >= limit)
            if self._feed is not None:  # the last token of an unfinished row waits: no last piece is empty
                self._feed.put(row.key, tokens[: length if row.finished else length - 1], final=row.finished)
        positions = tokens_bS.size(1) - min(contexts)
        self.effort.add(positions, len(wave.rows), drawn, time.monotonic() - started)
        self.pool.decoded(wave, ends)

    def _watch(self, wave: Wave, limits: Sequence[int], contexts: Sequence[int]) -> Watch:
        """Feed the scorer; end the wave when few enough rows run."""
        least = max(1, self._decoder.min_new)
        send = self._sender([row.key for row in wave.rows], limits, contexts)

        def watch(tokens_bS: Tensor, ends_b: Tensor) -> bool:
            send(tokens_bS, ends_b)
            end, ends = tokens_bS.size(1), ends_b.tolist()
            running = [i for i, limit in enumerate(limits) if ends[i] < 0 and end < limit]
            begun = end > max(contexts)
            ripe = begun and all(wave.rows[i].tokens or end - contexts[i] >= least for i in running)
            return ripe and wave.enough(running)

        return watch

    def _sender(self, keys: Sequence[int], limits: Sequence[int], contexts: Sequence[int]) -> Callable[[Tensor, Tensor], None]:
        """Stream rows once per chunk: (tokens [b, S], ends [b]), cut before their last token, so that no last piece is empty."""
        feed, due = self._feed, min(contexts) + self.chunk

        def send(tokens_bS: Tensor, ends_b: Tensor) -> None:
            nonlocal due
            if feed is None or not feed.is_open or tokens_bS.size(1) < due:
                return
            due = tokens_bS.size(1) + self.chunk
            for key, tokens, end, limit in zip(keys, tokens_bS.tolist(), ends_b.tolist(), limits, strict=True):
                ended = end >= 0
                feed.put(key, tokens[: end + 1 if ended else min(len(tokens), limit) - 1], final=ended)

        return send


def _batches(pool: Pool, micro: int, num_microbatches: int) -> Iterator[dict[str, Tensor]]:
    pool.begin(micro * num_microbatches, micro)
    for _ in range(num_microbatches):
        yield {"count": torch.tensor(micro)}
    pool.end()


def fill(
    pool: Pool, draw: int, sampler_iter: Iterator[Sequence[int]], num_microbatches: int, dataset: Any,
    collate_fn: Callable[[list[Any]], Mapping[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """Draw `draw` prompts not in the pool.  Raises DataError if the sampler has fewer."""
    first = next(sampler_iter, None)
    if first is None:
        raise DataError("the sampler gives no prompt, but the epoch has some left; let num_rollout_samples divide the data")
    ids = list(islice(chain.from_iterable(chain([first], sampler_iter)), len(pool), len(pool) + draw))
    if len(pool) + len(ids) < len(first) * num_microbatches:
        raise DataError(
            f"the sampler ends after {len(ids)} of {draw} prompts; let num_rollout_samples and "
            "rollout_micro_batch_size divide the data"
        )
    if ids:
        drawn = collate_fn([dataset[index] for index in ids])
        pool.admit([t[:n].tolist() for t, n in zip(drawn["text"], drawn["length"].tolist(), strict=True)])
    return _batches(pool, len(first), num_microbatches)
