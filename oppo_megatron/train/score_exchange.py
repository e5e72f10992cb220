"""Bringing what the scorers found to every rank.

Legend: B rollouts of the batch, T their response tokens (packed), P parts of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.records import Rollout
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.runtime.stream import share
from oppo_megatron.train.places import Place
from oppo_megatron.train.scorers import CRITIC_STATS, ScorerSide

TIMES = ("score", "wait_tokens")


@dataclass(frozen=True)
class ScoreReport:
    """What comes with the scores: mean of each reward part, seconds of the scorers' first rank, the last critic update."""

    parts: dict[str, float]
    score_busy_s: float
    scorer_idle_s: float
    critic: dict[str, float]


@dataclass
class ScoreExchange:
    """Collective of the world, once a step.  Sizes follow from the batch, which every rank knows."""

    rank: int
    device: torch.device
    places: dict[str, Place]
    rewards: RewardSum
    tokenizer: Tokenizer

    def gather(
        self, batch: Sequence[Rollout], scorers: ScorerSide | None, seconds: dict[str, float]
    ) -> tuple[ScoredBatch, ScoreReport]:
        """Scores, values and reference log-probs of the batch on every rank.  Raises RewardError on the scorers' first."""
        num_tokens = sum(len(r.tokens) for r in batch)
        reference_T = self._share("reference", batch, scorers, num_tokens)
        values_T = self._share("critic", batch, scorers, num_tokens)
        model_B = self._share("reward", batch, scorers, len(batch)) if "reward" in self.places else None
        totals_B, parts = self._rewards(batch, model_B)
        leader = self.places["critic"].ranks[0]
        times = torch.tensor([seconds.get(name, 0.0) for name in TIMES]) if self.rank == leader else None
        busy_s, idle_s = share(times, len(TIMES), leader, self.device).tolist()
        logp_T = torch.tensor([x for r in batch for x in r.logprobs], dtype=torch.float32, device=self.device)
        scored = ScoredBatch(
            behaviour_logp_T=logp_T,
            reference_logp_T=reference_T.float(),
            values_T=values_T.float(),
            scores_B=totals_B.float(),
            lengths_B=[len(r.tokens) for r in batch],
            truncated_B=torch.tensor([r.finish_reason == "length" for r in batch], device=self.device),
        )
        return scored, ScoreReport(parts, busy_s, idle_s, self.critic_stats(scorers))

    def critic_stats(self, scorers: ScorerSide | None) -> dict[str, float]:
        """Statistics of the critic's last update, on every rank."""
        source = self.places["critic"].output_rank
        mine = None
        if self.rank == source:
            assert scorers is not None
            mine = torch.tensor([scorers.critic_stats[name] for name in CRITIC_STATS], dtype=torch.float64)
        return dict(zip(CRITIC_STATS, share(mine, len(CRITIC_STATS), source, self.device).tolist(), strict=True))

    def _share(self, role: str, batch: Sequence[Rollout], scorers: ScorerSide | None, size: int) -> Tensor:
        source, mine = self.places[role].output_rank, None
        if self.rank == source:
            assert scorers is not None
            mine = scorers.scorers[role].collect(batch)
        return share(mine, size, source, self.device)

    def _rewards(self, batch: Sequence[Rollout], model_B: Tensor | None) -> tuple[Tensor, dict[str, float]]:
        """Total reward of each rollout [B], and the mean of each part.  User code runs on one rank only."""
        leader, labels = self.places["critic"].ranks[0], [s.label for s in self.rewards.summands]
        table = None
        if self.rank == leader:
            rows = []
            for i, rollout in enumerate(batch):
                response = self.tokenizer.decode(rollout.tokens)
                score = None if model_B is None else float(model_B[i])
                reward = self.rewards.evaluate(
                    rollout.prompt.text, response, rollout.prompt.fields, score, rollout.seq_id
                )
                rows.append([reward.total, *reward.parts.values()])
            table = torch.tensor(rows, dtype=torch.float64).flatten()
        shared = share(table, len(batch) * (1 + len(labels)), leader, self.device).view(len(batch), -1)
        return shared[:, 0], dict(zip(labels, shared[:, 1:].mean(0).tolist(), strict=True))
