"""The rewards that a process reward model's outputs come to: read at the ends of steps, on every rank alike.

Legend: B responses, T their tokens (packed), S their steps (packed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import response_scores, step_scores
from oppo_megatron.config.data import RewardPart
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.mcore.host_copies import on_device
from oppo_megatron.token_text import StepEnds


@dataclass(frozen=True)
class StepRewards:
    """Of the part of the reward whose kind is process."""

    part: RewardPart
    step_ends: StepEnds

    @classmethod
    def of(cls, parts: Sequence[RewardPart], tokenizer: Tokenizer) -> StepRewards | None:
        """None where no part is of the kind process."""
        found = next((part for part in parts if part.kind == "process"), None)
        return None if found is None else cls(found, StepEnds(found.separator, tokenizer.decode))

    def ends(self, responses: Sequence[Sequence[int]]) -> list[list[int]]:
        """The last tokens of the steps of each response."""
        return [self.step_ends.of(response) for response in responses]

    def scores(self, logits_S: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        """The score of each response [B], from the outputs at the ends of its steps."""
        return response_scores(step_scores(logits_S), [len(row) for row in ends], self.part.step_rewards)[0]

    def of_tokens(self, logits_T: Tensor, responses: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """The score of each response [B], from the outputs at all its tokens, and the weighed rewards of tokens [T].

        The latter are None where only the whole response is rewarded.
        """
        ends = self.ends(responses)
        starts = accumulate((len(response) for response in responses), initial=0)
        places = [start + end for start, row in zip(starts, ends, strict=False) for end in row]
        places_S = on_device(places, logits_T.device)
        counts = [len(row) for row in ends]
        scores_B, rewards_S = response_scores(step_scores(logits_T[places_S]), counts, self.part.step_rewards)
        if rewards_S is None:
            return scores_B, None
        return scores_B, torch.zeros_like(logits_T, dtype=torch.float32).index_put_(
            (places_S,), (self.part.weight * rewards_S).float()
        )
