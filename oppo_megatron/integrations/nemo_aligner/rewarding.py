"""The client of reward model and critic as the trainer sees it: rewards of streamed rows, values of NeMo-Aligner's critic.

Legend: b rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.server_utils import FutureResult
from torch import Tensor

from oppo_megatron.errors import RewardError
from oppo_megatron.integrations.nemo_aligner.agreement import raise_together
from oppo_megatron.integrations.nemo_aligner.feed import Feed
from oppo_megatron.integrations.nemo_aligner.pooled_actor import KEY


class StreamedScores(FutureResult):
    """Rewards that the feed has, or will have; values that `critic` has been asked for."""

    def __init__(self, critic: Any, take: Callable[[], Tensor]):
        self._critic, self._take = critic, take

    def result(self) -> tuple[Tensor, Tensor]:
        """(rewards [b], values [b, S - 1]), on every rank of the model."""
        rewards_b = self._take()
        _, values = self._critic.result() if isinstance(self._critic, FutureResult) else self._critic
        return rewards_b, values


class StreamedRewards:
    """Stands for the user's `rm_critic`: all but `infer_rm_critic` is its own.  `feed` None: so is that.

    The trainer asks for the rollouts of a step one after the other and then takes the answers in that order; with the last of
    them all ranks learn whether any scorer has failed.
    """

    def __init__(self, rm_critic: Any, feed: Feed | None):
        self._rm_critic, self._feed = rm_critic, feed
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rm_critic, name)

    def infer_rm_critic(self, rollout: dict[str, Tensor]) -> Any:
        """A future, or what the user's client gives, of rewards f32 [b] and values f32 [b, S - 1]."""
        feed = self._feed
        if feed is None:
            return self._rm_critic.infer_rm_critic(rollout)
        keys = rollout.pop(KEY).tolist()  # the trainer's rollouts have what NeMo-Aligner's have
        self._asked += 1
        return StreamedScores(self._rm_critic.infer_rm_critic(rollout), lambda: self._scores(feed, keys))

    def _scores(self, feed: Feed, keys: list[int]) -> Tensor:
        rewards_b = torch.tensor(feed.take(keys), dtype=torch.float32, device=torch.cuda.current_device())
        dist.all_reduce(rewards_b, group=parallel_state.get_model_parallel_group())  # zeros but for the rank that feeds
        self._asked -= 1
        if self._asked == 0:
            raise_together(feed.give_failure(), RewardError)
        return rewards_b
