"""What a service scores with: the weighted sum of its parts, with a reward model on this process where one is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from oppo_megatron.config.serve import ServeRewardConfig
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rewards.protocol import Item
from oppo_megatron.serving.app import Scorer
from oppo_megatron.serving.checking import build_rewards


@contextmanager
def open_scorer(config: ServeRewardConfig, environment: Mapping[str, str]) -> Iterator[Scorer]:
    """Raises ConfigError or CheckpointError, before anything is served, for what cannot be loaded."""
    with ExitStack() as stack:
        rewards = build_rewards(config, environment)
        stack.callback(rewards.close)
        if not rewards.needs_model:
            yield lambda items: _sum(rewards, items, [None] * len(items))
            return
        from oppo_megatron.serving.model_scorer import open_model

        model = stack.enter_context(open_model(config))
        yield lambda items: _sum(rewards, items, model.scores(items))


def _sum(rewards: RewardSum, items: Sequence[Item], model_scores: Sequence[float | None]) -> list[float]:
    return [
        rewards.score(item.prompt, item.response, item.fields, score, item.id)
        for item, score in zip(items, model_scores, strict=True)
    ]
