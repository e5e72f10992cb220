"""`oppo serve-reward` and `oppo serve-scorer`: their settings, and the rules that tie them together."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.checks import check_rewards, check_source
from oppo_megatron.config.data import RewardPart, TokenizerConfig
from oppo_megatron.config.model import RoleConfig, RuntimeConfig
from oppo_megatron.config.paths import check_exists
from oppo_megatron.config.remote import RequestLimitsConfig


class ServeRewardConfig(Section):
    """`oppo serve-reward`: the weighted sum of `rewards`, for runs elsewhere."""

    rewards: list[RewardPart] = Field(..., min_length=1, description="the reward is the sum of these parts")
    host: str = Field("127.0.0.1", description="address to listen on; one that others can reach needs `token_env`")
    port: Annotated[int, Unit("")] = Field(
        8900, ge=0, le=65535, description="port to listen on; 0: a free one, which is printed"
    )
    token_env: str | None = Field(
        None, description="environment variable with the bearer token that every request must carry; null: none needed"
    )
    limits: RequestLimitsConfig = RequestLimitsConfig()
    reward: RoleConfig | None = Field(None, description="the reward model, where `rewards` names one; on one process")
    tokenizer: TokenizerConfig | None = Field(None, description="the reward model's; for requests without token ids")
    max_tokens: int = Field(4096, ge=2, description="longest prompt + response that the reward model reads")
    runtime: RuntimeConfig = RuntimeConfig()


class ServeScorerConfig(Section):
    """`oppo serve-scorer`: a reward model that keeps the cache of every sequence, for runs that stream to it."""

    reward: RoleConfig = Field(..., description="the reward model; on one process")
    host: str = Field("127.0.0.1", description="address to listen on; one that others can reach needs `token_env`")
    port: Annotated[int, Unit("")] = Field(
        8901, ge=0, le=65535, description="port to listen on; 0: a free one, which is printed"
    )
    token_env: str | None = Field(
        None, description="environment variable with the bearer token that every request must carry; null: none needed"
    )
    limits: RequestLimitsConfig = RequestLimitsConfig()
    max_tokens: int = Field(4096, ge=2, description="longest prompt + response that the reward model reads")
    sequences: Annotated[int, Unit("sequences")] = Field(
        256,
        ge=1,
        description="sequences whose cache is held; the one unused for the longest goes first, and is sent again",
    )
    runtime: RuntimeConfig = RuntimeConfig()


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


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this host can reach; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
