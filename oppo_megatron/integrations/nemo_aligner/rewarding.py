"""The client of reward model and critic as the trainer sees it: rewards of streamed rows, values of NeMo-Aligner's critic.

Legend: b rows of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nemo_aligner.utils.distributed import broadcast_2d_tensor_within_mp
from nemo_aligner.utils.server_utils import FutureResult
from torch import Tensor

from oppo_megatron.integrations.nemo_aligner.pooled_actor import KEY
from oppo_megatron.rewards.streaming import ScorerStream


class StreamedScores(FutureResult):
    """Rewards that the stream has, or will have; values that `critic` has been asked for."""

    def __init__(self, critic: Any, stream: ScorerStream | None, keys: Sequence[int]):
        self._critic, self._stream, self._keys = critic, stream, keys

    def result(self) -> tuple[Tensor, Tensor]:
        """(rewards [b], values [b, S - 1]), on every rank of the model."""
        rewards_b1 = None
        if self._stream is not None:
            device = torch.cuda.current_device()
            rewards_b1 = torch.tensor([[self._stream.result(key)] for key in self._keys], device=device)
        rewards_b1 = broadcast_2d_tensor_within_mp(rewards_b1)
        _, values = self._critic.result() if isinstance(self._critic, FutureResult) else self._critic
        return rewards_b1.flatten(), values


class StreamedRewards:
    """Stands for the user's `rm_critic`: all but `infer_rm_critic` is its own.

    `streamed`: rewards are the scorer's.  `stream` is where this rank is the one that asks for its replica.
    """

    def __init__(self, rm_critic: Any, streamed: bool, stream: ScorerStream | None):
        self._rm_critic, self._streamed, self._stream = rm_critic, streamed, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rm_critic, name)

    def infer_rm_critic(self, rollout: Mapping[str, Tensor]) -> Any:
        """A future, or what the user's client gives, of rewards f32 [b] and values f32 [b, S - 1]."""
        plain = {name: tensor for name, tensor in rollout.items() if name != KEY}
        answer = self._rm_critic.infer_rm_critic(plain)
        if not self._streamed:
            return answer
        return StreamedScores(answer, self._stream, rollout[KEY].tolist())
