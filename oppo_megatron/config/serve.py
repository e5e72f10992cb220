"""`oppo serve-reward` and `oppo serve-scorer`: their settings, and the rules that tie them together."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import RewardPart, TokenizerConfig
from oppo_megatron.config.model import RoleConfig, RuntimeConfig


class ServiceConfig(Section):
    """Settings that every service has: its address, its token, and its use of the machine."""

    host: str = Field(
        "127.0.0.1", description="address to listen on; an address that others can reach needs `token_env`"
    )
    port: Annotated[int, Unit("")] = Field(
        8900, ge=0, le=65535, description="port to listen on; 0: a free one, which is printed"
    )
    token_env: str | None = Field(
        None, description="environment variable with the bearer token that every request must carry; null: none needed"
    )
    max_tokens: int = Field(4096, ge=2, description="longest prompt + response that the reward model reads")
    runtime: RuntimeConfig = RuntimeConfig()


class ServeRewardConfig(ServiceConfig):
    """`oppo serve-reward`: the weighted sum of `rewards`, for runs elsewhere."""

    rewards: list[RewardPart] = Field(..., min_length=1, description="the reward is the sum of these parts")
    reward: RoleConfig | None = Field(None, description="the reward model, if `rewards` names one; on one process")
    tokenizer: TokenizerConfig | None = Field(
        None, description="the reward model's tokenizer, for requests without token ids"
    )

    @field_validator("rewards")
    @classmethod
    def _of_whole_responses(cls, parts: list[RewardPart]) -> list[RewardPart]:
        if any(part.kind == "process" for part in parts):
            raise ValueError("parts of other kinds than process, which is for the reward model of `oppo train`")
        return parts


class ServeScorerConfig(ServiceConfig):
    """`oppo serve-scorer`: a reward model that keeps the cache of every sequence, for runs that stream to it."""

    port: Annotated[int, Unit("")] = Field(
        8901, ge=0, le=65535, description="port to listen on; 0: a free one, which is printed"
    )
    reward: RoleConfig = Field(..., description="the reward model; on one process")
    sequences: Annotated[int, Unit("sequences")] = Field(
        256,
        ge=1,
        description="sequences whose caches are held; the one unused for the longest is dropped first, and sent again",
    )


def is_loopback(host: str) -> bool:
    """Whether only this host can reach the address; false for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
