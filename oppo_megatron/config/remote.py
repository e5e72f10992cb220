"""Sections of rewards that are computed elsewhere: by a service over HTTP, or by a process with limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


class RemoteRewardConfig(Section):
    """Requests to a reward service.  A failure is never a score: the sequence waits, or the run stops."""

    timeout_s: float = Field(
        30.0, gt=0, description="time limit of one request, from connecting to the last byte of its answer"
    )
    max_batch: Annotated[int, Unit("responses")] = Field(32, ge=1, description="responses in one request")
    send_tokens: bool = Field(False, description="also send the token ids of prompt and response (for a reward model)")
    give_up_s: float = Field(
        600.0,
        ge=0,
        description="a failed request is sent again; the run ends once a request has had no answer for this long; 0: "
        "at the first failure",
    )


START_S = 60.0
"""Time limit for starting an isolated function's process and importing its module."""


class IsolationConfig(Section):
    """Limits of the process of a user's reward function.  They contain accidents, not attackers: this is not a sandbox."""

    wall_s: float = Field(
        30.0, gt=0, description="time limit of one call, in wall-clock seconds and in processor seconds"
    )
    memory_mb: int = Field(4096, ge=64, description="address space of the process, in MiB")
