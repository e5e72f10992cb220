"""Sections of the two overlaps: intra-step (chunks, streamed scoring) and inter-step (delta, deferral)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from oppo_megatron.config.base import Section, Unit


class ChunkConfig(Section):
    """Chunk size of the token stream: decode steps a round."""

    tokens: int = Field(32, ge=1, description="decode steps in a round, at the start")
    adaptive: bool = Field(True, description="search for the fastest size; false: stay at `tokens`")
    candidates: Annotated[list[PositiveInt], Unit("tokens")] = Field(
        default=[16, 32, 64], min_length=1, description="sizes that a search tries beside the one in force"
    )
    period: Annotated[int, Unit("steps")] = Field(50, ge=1, description="steps from one search to the next")


class DeltaConfig(Section):
    """How many prompts more than the batch are decoded (the paper's delta)."""

    rule: Literal["eq4", "algorithm1", "eq4_literal", "measured", "fixed"] = Field(
        "eq4", description="what moves delta; see docs/algorithm.md"
    )
    initial: Annotated[int, Unit("prompts")] = Field(4, ge=0, description="delta of the first step")
    min: Annotated[int, Unit("prompts")] = Field(0, ge=0, description="smallest delta")
    max: Annotated[int, Unit("prompts")] = Field(8, ge=0, description="largest delta; at most the batch size")
    window: Annotated[int, Unit("steps")] = Field(
        5, ge=1, description="steps averaged by the rule (W or w in the paper)"
    )
    increase: Annotated[int, Unit("prompts")] = Field(
        1, ge=1, description="delta_inc of eq. 4; `measured` grows by it too"
    )
    decrease: Annotated[int, Unit("prompts")] = Field(
        1, ge=1, description="delta_dec of eq. 4; `measured` shrinks by it too"
    )


class CarryConfig(Section):
    """How prompts enter, are decoded in chunks, and are carried from step to step."""

    chunk: ChunkConfig = ChunkConfig()
    delta: DeltaConfig = DeltaConfig()
    max_deferrals: Annotated[int, Unit("steps")] = Field(
        4, ge=1, description="a rollout carried this often is waited for"
    )


class OverlapConfig(CarryConfig):
    """The two switches of the one loop, and their settings."""

    intra: bool = Field(True, description="stream chunks to the scorers while the actor decodes")
    inter: bool = Field(True, description="overcommit delta prompts and carry what is unfinished")
    schedule: Literal["auto", "intra", "woven"] = Field(
        "auto",
        description="a round's schedule where intra is on: scoring before decoding on ranks that do both, or woven into "
        "the bubbles of the decode pipeline; auto: woven where ranks do both",
    )
    weave: Annotated[list[PositiveInt | Literal["auto"]], Unit("micro-batches, tokens")] = Field(
        default=["auto", "auto"],
        min_length=2,
        max_length=2,
        description="where decoding and scoring share pipeline stages: decode micro-batches of each replica, and most tokens of "
        "a scorer's prefill micro-batch; auto: by the measured times of the stages. What is chosen decides which sequences "
        "are computed together, hence rounding: a run that must repeat to the bit fixes both",
    )
    critic_reads: Literal["sure", "likely", "all"] = Field(
        "likely",
        description="what the critic scores before a batch is complete: rollouts that are sure to be in it, all while those "
        "unfinished are more likely than not to be, or all; values of a rollout are lost with the critic's update where it "
        "is carried on",
    )
    backfill: Annotated[bool | PositiveInt, Unit("decode steps")] = Field(
        False,
        description="with inter: refill the places of finished rollouts within a step, so that B + delta are decoded; a number "
        "is of the decode steps from one admission of prompts to the next, a multiple of `chunk.tokens`, and no chunk is "
        "longer; true: `chunk.tokens`",
    )
    actor_kv: Literal["recompute", "keep"] = Field(
        "recompute", description="the actor's KV cache of a carried rollout after an update"
    )

    @property
    def admission_period(self) -> int | None:
        """Decode steps from one admission within a step to the next; None: prompts enter between steps only."""
        if not (self.inter and self.backfill):
            return None
        return self.chunk.tokens if self.backfill is True else self.backfill
