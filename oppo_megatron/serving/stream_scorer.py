"""A reward model for streamed sequences, prefilling each token once.  T: packed tokens, R: rows of interest."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.errors import RewardError
from oppo_megatron.mcore.device import memory_for
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.rewards.streaming import checksum
from oppo_megatron.serving.app import Known, Piece
from oppo_megatron.serving.model_scorer import open_reward_model

Name = tuple[str, int]


@dataclass
class _Held:
    """`checksum`: of the sequence's `known` tokens."""

    number: int
    known: int = 0
    checksum: int = 0


class StreamScorer:
    """Caches up to `sequences` sequences; evicts the least recently used."""

    def __init__(self, model: RoleModel, *, sequences: int, max_tokens: int, micro_batch_tokens: int):
        self.model, self.max_tokens, self.micro_batch_tokens = model, max_tokens, micro_batch_tokens
        self.cache = model.new_cache(sequences)
        self._held: OrderedDict[Name, _Held] = OrderedDict()
        self._next = 0

    @torch.no_grad()
    def extend(self, session: str, pieces: Sequence[Piece]) -> list[Known]:
        """Take the pieces; complete sequences are scored and forgotten, failed ones dropped.

        Raises RewardError for unreadable tokens before taking any.
        """
        for piece in pieces:
            if not 0 < piece.offset + len(piece.tokens) <= self.max_tokens:
                raise RewardError(
                    f"sequence {piece.id} has {piece.offset + len(piece.tokens)} tokens, but must have 1 to max_tokens "
                    f"{self.max_tokens}"
                )
            if piece.tokens and max(piece.tokens) >= self.model.shape.vocab_size:
                raise RewardError(
                    f"sequence {piece.id} has token id {max(piece.tokens)}, but the reward model knows "
                    f"{self.model.shape.vocab_size}: the run and the service must have the same tokenizer"
                )
        if self.cache.device.type == "cuda":
            torch.cuda.set_device(self.cache.device)  # which device is current is a thread's own
        return [self._take((session, piece.id), piece) for piece in pieces]

    def _take(self, name: Name, piece: Piece) -> Known:
        held = self._find(name)
        if piece.offset > held.known:
            return Known(id=piece.id, known=held.known)  # earlier tokens were evicted
        fresh = piece.tokens[held.known - piece.offset :]
        if not fresh and piece.final:  # the last position is to be read again: it gives the score
            self._drop(name)
            return Known(id=piece.id, known=0)
        grown = checksum(fresh, held.checksum)
        if grown != piece.checksum:
            whole = held.known == 0
            self._drop(name)
            if whole:
                raise RewardError(f"sequence {piece.id}: the checksum does not fit its {len(piece.tokens)} tokens")
            return Known(id=piece.id, known=0)
        try:
            score = self._prefill(held, fresh)
        except BaseException:
            self._drop(name)
            raise
        held.known, held.checksum = held.known + len(fresh), grown
        if not piece.final:
            return Known(id=piece.id, known=held.known)
        self._drop(name)
        if not math.isfinite(score):
            raise RewardError(f"sequence {piece.id}: the reward model gives {score} for it, which is not a score")
        return Known(id=piece.id, known=held.known, score=score)

    def _find(self, name: Name) -> _Held:
        held = self._held.get(name)
        if held is None:
            if not self.cache.num_free:
                known = {each.number for each in self._held.values()}
                left = next((number for number in self.cache.seq_ids if number not in known), None)
                if left is None:
                    self._drop(next(iter(self._held)))
                else:
                    self.cache.close(left)
            held = _Held(self._next)
            self.cache.open(held.number)
            self._held[name], self._next = held, self._next + 1
        self._held.move_to_end(name)
        return held

    def _drop(self, name: Name) -> None:
        self.cache.close(self._held.pop(name).number)

    def _prefill(self, held: _Held, tokens: Sequence[int]) -> float:
        score = 0.0
        for start in range(0, len(tokens), self.micro_batch_tokens):
            part = tokens[start : start + self.micro_batch_tokens]
            tokens_T = torch.tensor(part, dtype=torch.int64, device=self.cache.device)
            last_R = torch.tensor([len(part) - 1], device=self.cache.device)
            score = float(step(self.model, self.cache, [held.number], [len(part)], tokens_T, last_R)[0])
        return score


@contextmanager
def open_stream_scorer(config: ServeConfig) -> Iterator[StreamScorer]:
    """Load the model.  Raises CapacityError if the cache does not fit."""
    assert config.reward is not None, "a rule of ServeConfig"
    with open_reward_model(config.reward, config.runtime, max_tokens=config.max_tokens) as (model, _):
        caches = f"making KV caches for {config.sequences} sequences of {config.max_tokens} tokens"
        with memory_for(lambda: (caches, "lower sequences or max_tokens")):
            most, packed = config.max_tokens, config.runtime.micro_batch_tokens
            scorer = StreamScorer(model, sequences=config.sequences, max_tokens=most, micro_batch_tokens=packed)
        yield scorer
