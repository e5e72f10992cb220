"""Scores of streamed rows [b], and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.server_utils import FutureResult
from torch import Tensor

from oppo_megatron.errors import OppoError, RewardError
from oppo_megatron.rewards.streaming import ScorerStream

KEY = "oppo_row"
"""A streamed row's name from `infer` to `infer_rm_critic`: int64 [b]."""
Known = TypeVar("Known")


def as_first(known: Known) -> Known:
    """Return the first rank's value.  Collective."""
    told = [known]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def raise_together(error: Exception | None, kind: type[OppoError]) -> None:
    """Raise on all ranks if any has an `error` (on others a `kind`).  Collective."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise kind(f"rank {rank}: {text}")


class Feed:
    """Puts rows into `stream`, if this rank has one; keeps an error until all ranks learn of it."""

    def __init__(self, stream: ScorerStream | None):
        self._stream = stream
        self._failure: Exception | None = None
        self._names: dict[int, int] = {}  # names of rows in the stream, if they differ from the rows' own
        self._others = count(-1, -1)

    @property
    def is_open(self) -> bool:
        return self._stream is not None and self._failure is None

    def put(self, key: int, tokens: Sequence[int], final: bool) -> None:
        if self._stream is None or self._failure is not None:
            return
        try:
            if not self._stream.put(self._name(key), tokens, final):
                self._stream.forget([self._name(key)])
                self._names[key] = next(self._others)
                self._stream.put(self._name(key), tokens, final)
        except Exception as error:
            self._failure = error

    def take(self, keys: Sequence[int]) -> list[float]:
        """Wait for scores; zeros on other ranks and after an error."""
        if self._stream is None or self._failure is not None:
            return [0.0] * len(keys)
        try:
            return [self._stream.result(self._names.pop(key, key)) for key in keys]
        except Exception as error:
            self._failure = error
            return [0.0] * len(keys)

    def forget(self, keys: Sequence[int]) -> None:
        if self._stream is not None:
            self._stream.forget([self._names.pop(key, key) for key in keys])

    def _name(self, key: int) -> int:
        return self._names.get(key, key)

    def give_failure(self) -> Exception | None:
        failure, self._failure = self._failure, None
        return failure


class StreamedScores(FutureResult):
    def __init__(self, critic: Any, take: Callable[[], Tensor]):
        self._critic, self._take = critic, take

    def result(self) -> tuple[Tensor, Tensor]:
        """Return rewards [b] and values [b, S - 1], on every rank."""
        rewards_b = self._take()
        _, values = self._critic.result() if isinstance(self._critic, FutureResult) else self._critic
        return rewards_b, values


class StreamedRewards:
    """`rm_critic` with rewards of `feed`; failures reach all ranks."""

    def __init__(self, rm_critic: Any, feed: Feed | None):
        self._rm_critic, self._feed = rm_critic, feed
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rm_critic, name)

    def infer_rm_critic(self, rollout: dict[str, Tensor]) -> Any:
        feed = self._feed
        if feed is None:
            return self._rm_critic.infer_rm_critic(rollout)
        keys = rollout.pop(KEY).tolist()  # rollouts have NeMo-Aligner's keys only
        self._asked += 1
        return StreamedScores(self._rm_critic.infer_rm_critic(rollout), lambda: self._scores(feed, keys))

    def _scores(self, feed: Feed, keys: list[int]) -> Tensor:
        rewards_b = torch.tensor(feed.take(keys), dtype=torch.float32, device=torch.cuda.current_device())
        dist.all_reduce(rewards_b, group=parallel_state.get_model_parallel_group())  # zeros but for the rank that feeds
        self._asked -= 1
        if self._asked == 0:
            raise_together(feed.give_failure(), RewardError)
        return rewards_b
