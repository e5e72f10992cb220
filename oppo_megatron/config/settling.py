"""Section of responses that end early, because their reward can no longer change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit


class SettleConfig(Section):
    """Ending early: a response whose reward no longer depends on what follows is decoded no further.

    Every part of `rewards` must be able to decide this for a prefix (docs/rewards.md, "Settled prefixes"): the rules `format`,
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
        description="decode steps between two questions to the rewards, at which responses may end, whatever the chunk size; "
        "null: those between two admissions (`overlap.backfill`), without it `overlap.chunk.tokens`",
    )
    audit: Annotated[int, Unit("groups")] = Field(
        16,
        ge=0,
        description="decode the responses to one prompt in this many to their ends, and check that their rewards are those that "
        "were predicted; 0: none",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value
