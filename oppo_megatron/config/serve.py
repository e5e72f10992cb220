"""`oppo serve`: its settings and rules."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.model import RoleConfig, RuntimeConfig
from oppo_megatron.config.rewards import RewardPart


class ServeConfig(Section):
    """`oppo serve`: rewards over HTTP.

    With `rewards` it answers whole responses with their weighted sum, for parts of kind http (docs/rewards.md). Without, it
    serves the model `reward` to runs that stream growing sequences (docs/nemo_aligner.md).
    """

    host: str = Field("127.0.0.1", description="address to listen on; if others can reach it, with `token_env`")
    port: Annotated[int, Unit("")] = Field(8900, ge=0, le=65535, description="0: a free one, which is printed")
    token_env: str | None = Field(None, description="environment variable with the bearer token of all requests")
    max_tokens: int = Field(4096, ge=2, description="longest prompt + response that the reward model reads")
    runtime: RuntimeConfig = RuntimeConfig()
    rewards: list[RewardPart] = Field([], description="parts of a weighted sum; empty: stream to `reward`")
    reward: RoleConfig | None = Field(None, description="the reward model, on one process; required without `rewards`")
    tokenizer: TokenizerConfig | None = Field(None, description="the reward model's, for requests without token ids")
    sequences: Annotated[int, Unit("sequences")] = Field(
        256, ge=1, description="without `rewards`: sequences whose KV caches are kept; the least recently used is dropped first"
    )

    @property
    def streams(self) -> bool:
        return not self.rewards

    def rules(self) -> Iterator[str]:
        if self.token_env is None and self.host != "localhost" and not is_loopback(self.host):
            yield f"host is {self.host!r}, which others can reach, but token_env is not set; set it, or listen on 127.0.0.1"
        if self.reward is None:
            if self.streams:
                yield "neither rewards nor reward is given, so there is nothing to serve; add parts of a reward, or a model"
        elif self.reward.ranks is not None or self.reward.parallel is not None:
            yield "reward.ranks and reward.parallel are for runs, but a service is a single process; remove them"
        if self.streams:
            if self.tokenizer is not None:
                yield "tokenizer is given, but without rewards a service receives token ids and does not read it; remove it"
            return
        if self.sequences != type(self).model_fields["sequences"].default:
            yield f"sequences is {self.sequences}, but a service with rewards keeps no caches; remove it, or remove rewards"
        if self.reward is not None and self.tokenizer is None:
            yield "a reward model is served, but there is no `tokenizer` section; add the one that it was trained with"
        for index, part in enumerate(self.rewards):
            if part.kind == "process":
                yield f"rewards.{index} is of kind process, which is for the reward model of `oppo train`; choose another kind"
            if part.kind == "http":
                yield f"rewards.{index} is of kind http, but a service does not pass requests on; let the run ask that service"
            if part.name == "length":
                yield f"rewards.{index} is of rule length, but a service gets no counts of tokens; name it in the run's file"


def is_loopback(host: str) -> bool:
    """True if only this host can connect; False for host names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
