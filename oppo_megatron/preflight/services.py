"""Rules that tie the settings of `oppo serve-reward` and `oppo serve-scorer` together."""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.config.model import RoleConfig
from oppo_megatron.config.paths import check_exists
from oppo_megatron.config.serve import ServeRewardConfig, ServeScorerConfig, is_loopback
from oppo_megatron.preflight.settings import check_rewards, check_source


def check_serve_scorer(config: ServeScorerConfig) -> list[str]:
    """Every broken rule, a sentence each."""
    return [*_check_address(config), *_check_role(config.reward)]


def check_serve(config: ServeRewardConfig) -> list[str]:
    """Every broken rule, a sentence each."""
    return [
        *check_rewards(config.rewards, has_reward_model=config.reward is not None),
        *_check_parts(config),
        *_check_address(config),
        *_check_model(config),
    ]


def _check_parts(config: ServeRewardConfig) -> Iterator[str]:
    for index, part in enumerate(config.rewards):
        if part.kind == "http":
            yield f"rewards.{index} is of kind http, but a service does not pass requests on; let the run ask that service"
        if part.name == "length":
            yield f"rewards.{index} is of rule length, but a service gets no counts of tokens; name it in the run's file"


def _check_address(config: ServeRewardConfig | ServeScorerConfig) -> Iterator[str]:
    if config.token_env is None and config.host != "localhost" and not is_loopback(config.host):
        yield (
            f"host is {config.host!r}, which others can reach, but token_env is not set; name an environment variable that "
            "holds a token, or listen on 127.0.0.1"
        )


def _check_model(config: ServeRewardConfig) -> Iterator[str]:
    if config.reward is None:
        return
    if config.tokenizer is None:
        yield "a reward model is served, but there is no `tokenizer` section; add the one that it was trained with"
    else:
        yield from check_exists("tokenizer.path", config.tokenizer.path)
    yield from _check_role(config.reward)


def _check_role(role: RoleConfig) -> Iterator[str]:
    yield from check_source("reward", role)
    if role.ranks is not None or role.parallel is not None:
        yield "reward.ranks and reward.parallel are for runs, but a service is a single process; remove them"
