"""Section of responses that end early, because their reward can no longer change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit


class SettleConfig(Section):
    """Ending early: a response whose reward is the same whatever follows is decoded no further.

    Every part of `rewards` has to be able to say so of a prefix (docs/rewards.md, "Settled prefixes"): the rules `format`,
    `multiple_choice` and `gsm8k_first`, and functions with `settled`.  See docs/algorithm.md.
    """

    mode: Literal["off", "certain", "predicted"] = Field(
        "off",
        description="certain: only with settings under which the expected gradient stays what it is, others are refused; "
        "predicted: with any settings, and then the gradient is biased",
    )
    every: Annotated[int | None, Unit("decode steps")] = Field(
        None,
        ge=1,
        description="rewards are asked once in so many decode steps, whatever the chunk size, and responses end there; null: as "
        "many as lie between two admissions (`overlap.backfill`), without it `overlap.chunk.tokens`",
    )
    audit: Annotated[int, Unit("groups")] = Field(
        16,
        ge=0,
        description="the responses to one prompt of so many go on to their ends, and the rewards have to be what they were "
        "settled as; 0: none do",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value
