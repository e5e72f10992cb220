"""What a service needs, tried without loading a model or listening; needs none of the packages that serve."""

from __future__ import annotations

from collections.abc import Mapping

from oppo_megatron.config.serve import ServeRewardConfig, ServeScorerConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.rewards.functions import RewardSum, build_reward_functions
from oppo_megatron.rewards.protocol import read_token


def build_rewards(config: ServeRewardConfig, environment: Mapping[str, str]) -> RewardSum:
    """The service's sum.  What runs isolated from the service is not given its token either.  Raises ConfigError."""
    inherited = {name: value for name, value in environment.items() if name != config.token_env}
    return build_reward_functions(config.rewards, inherited)


def try_parts(config: ServeRewardConfig | ServeScorerConfig, environment: Mapping[str, str]) -> list[str]:
    """Token, rewards and tokenizer as the service would have them: a line about the rewards.  Raises ConfigError."""
    if config.token_env is not None:
        read_token(config.token_env, environment)
    if isinstance(config, ServeScorerConfig):
        return []
    rewards = build_rewards(config, environment)
    rewards.close()
    if config.reward is not None and config.tokenizer is not None:
        load_tokenizer(config.tokenizer)
    return ["rewards: " + ", ".join(f"{part.label} x {part.weight:g}" for part in rewards.summands)]
