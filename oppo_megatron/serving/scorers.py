"""A service's scorer; importable without the serving packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.rewards.functions import RewardSum, build_reward_functions
from oppo_megatron.rewards.protocol import Item, read_token

if TYPE_CHECKING:
    from oppo_megatron.serving.app import Scorer

ModelScores = Callable[[Sequence[Item]], Sequence[float | None]]


def build_rewards(config: ServeConfig, environment: Mapping[str, str]) -> RewardSum:
    """Build the sum; isolated parts do not see the service's token."""
    inherited = {name: value for name, value in environment.items() if name != config.token_env}
    return build_reward_functions(config.rewards, inherited)


def try_parts(config: ServeConfig, environment: Mapping[str, str]) -> list[str]:
    """Try token, rewards and tokenizer; return a line about them."""
    if config.token_env is not None:
        read_token(config.token_env, environment)
    if config.streams:
        return []
    rewards = build_rewards(config, environment)
    rewards.close()
    if config.reward is not None and config.tokenizer is not None:
        load_tokenizer(config.tokenizer)
    return ["rewards: " + ", ".join(f"{part.label} x {part.weight:g}" for part in rewards.summands)]


@contextmanager
def open_model_scores(config: ServeConfig, rewards: RewardSum) -> Iterator[ModelScores]:
    """Yield the reward model's scores (None without a model).  Raises ConfigError or CheckpointError."""
    if not rewards.reads_model():
        yield lambda items: [None] * len(items)
        return
    from oppo_megatron.serving.model_scorer import open_model

    with open_model(config) as model:
        yield model.scores


@contextmanager
def open_scorer(config: ServeConfig, environment: Mapping[str, str]) -> Iterator[Scorer]:
    with closing(build_rewards(config, environment)) as rewards, open_model_scores(config, rewards) as model_scores:
        yield lambda items: [
            rewards.score(item.prompt, item.response, item.fields, score, item.id)
            for item, score in zip(items, model_scores(items), strict=True)
        ]
