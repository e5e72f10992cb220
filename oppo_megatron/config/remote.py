"""Sections of rewards that are computed elsewhere: by a service over HTTP, or by a process with limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


class RemoteRewardConfig(Section):
    """How a reward service is asked.  A failure is never a score: the sequence waits, or the run stops."""

    timeout_s: float = Field(30.0, gt=0, description="one request, from connecting to the last byte of its answer")
    max_batch: Annotated[int, Unit("responses")] = Field(32, ge=1, description="responses in one request")
    max_in_flight: Annotated[int, Unit("requests")] = Field(
        4, ge=1, description="requests at once; all other responses wait here"
    )
    send_tokens: bool = Field(False, description="send the token ids of prompt and response too (for a reward model)")
    on_failure: Literal["wait", "stop"] = Field(
        "wait", description="a failed request is sent again until `give_up_s` are over, or ends the run at once"
    )
    give_up_s: float = Field(600.0, gt=0, description="a request without an answer for so long ends the run")
    retry_s: float = Field(0.5, gt=0, description="pause before the second attempt; doubled for each further one")
    retry_max_s: float = Field(30.0, gt=0, description="longest pause between attempts")
    breaker_failures: Annotated[int, Unit("requests")] = Field(
        5,
        ge=1,
        description="after so many failures in a row only a single request is tried, to see if the service is back",
    )
    breaker_pause_s: float = Field(10.0, gt=0, description="pause before each such request")
    min_score: Annotated[float | None, Unit("reward")] = Field(None, description="a lower score is a failure")
    max_score: Annotated[float | None, Unit("reward")] = Field(None, description="a higher score is a failure")


class IsolationConfig(Section):
    """Limits of the process that a user's reward function runs in.  They hold accidents, not attackers: no sandbox."""

    wall_s: float = Field(30.0, gt=0, description="one call, in seconds that pass")
    cpu_s: int = Field(30, ge=1, description="one call, in seconds of processor time")
    memory_mb: int = Field(4096, ge=64, description="address space of the process, in MiB")
    start_s: float = Field(60.0, gt=0, description="starting the process and importing the function's module")


class RequestLimitsConfig(Section):
    """What `oppo serve-reward` accepts; what is larger is answered with 413."""

    max_bytes: int = Field(8 << 20, ge=1024, description="bytes of a request's body")
    max_items: Annotated[int, Unit("responses")] = Field(256, ge=1, description="responses in a request")
    max_characters: Annotated[int, Unit("characters")] = Field(
        200_000, ge=1, description="characters of one prompt or response"
    )
    max_waiting: Annotated[int, Unit("requests")] = Field(
        16, ge=1, description="requests being scored or waiting for it; others are answered with 429"
    )
    read_s: float = Field(30.0, gt=0, description="a body that takes longer to come is refused")
