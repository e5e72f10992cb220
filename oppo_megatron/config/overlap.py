"""Sections of the two overlaps: intra-step (chunks, streamed scoring) and inter-step (delta, deferral)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from oppo_megatron.config.base import ImportPath, Section, Unit

SEARCH_STEPS = 50
"""Steps from one search for the fastest chunk size to the next."""


class DeltaConfig(Section):
    """The number of prompts decoded beyond the batch (the paper's delta)."""

    rule: Literal["eq4", "algorithm1", "eq4_literal", "measured", "fixed"] | ImportPath = Field(
        "eq4", description="rule that changes delta (docs/algorithm.md), or your own function (docs/extending.md)"
    )
    initial: Annotated[int, Unit("prompts")] = Field(4, ge=0, description="delta of the first step")
    max: Annotated[int, Unit("prompts")] = Field(8, ge=0, description="largest delta, up to `max_staleness` batches")
    window: Annotated[int, Unit("steps")] = Field(5, ge=1, description="steps averaged by the rule (paper's W, w)")


class CarryConfig(Section):
    """How prompts enter, are decoded in chunks, and are carried from step to step."""

    chunk: Annotated[PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)], Unit("decode steps")] = Field(
        [32, 16, 64],
        description="decode steps in a round, whose tokens are streamed together: a fixed number, or the sizes among which the "
        "fastest is searched while the run goes, the first one at its start",
    )
    delta: DeltaConfig = DeltaConfig()
    max_staleness: Annotated[int, Unit("steps")] = Field(
        4,
        ge=1,
        description="most steps that a prompt's rollouts are carried before they are trained; the batch "
        "waits for the oldest, and nothing is thrown away",
    )

    @property
    def chunk_sizes(self) -> list[int]:
        """Sizes that may be used, the first at the start; a single one is fixed."""
        return [self.chunk] if isinstance(self.chunk, int) else self.chunk

    @property
    def chunk_tokens(self) -> int:
        """Decode steps of a round at the start."""
        return self.chunk_sizes[0]


class ContinuousConfig(Section):
    """Generation that continues while the actor trains (docs/continuous.md)."""

    lag_steps: Annotated[NonNegativeInt | Literal["asap"], Unit("decode steps")] = Field(
        "asap",
        description="decode steps from a batch's completion to the installation of the weights trained on it; decoding "
        "waits if they are late; asap: they are installed once a chunk has ended after their arrival",
    )
    queue_size: Annotated[PositiveInt | None, Unit("prompts")] = Field(
        None, description="most complete prompts that wait for training: at the limit, none are admitted; null: no limit"
    )
    install: Literal["staged", "pause"] = Field(
        "staged",
        description="if the actor trains on other ranks: new weights are sent while decoding continues, into tensors of their "
        "own, and then copied (staged), or decoding pauses for their way, which needs no second tensors (pause)",
    )
    replay: Path | None = Field(
        None, description="`installs.jsonl` of another run: its weights were installed at these clocks, and are again"
    )


class OverlapConfig(CarryConfig):
    """The two switches of the one loop, and their settings."""

    intra: bool = Field(True, description="stream chunks to the scorers while the actor decodes")
    inter: bool = Field(True, description="overcommit delta prompts and carry unfinished rollouts to the next step")
    schedule: Literal["auto", "intra", "woven"] | ImportPath = Field(
        "auto",
        description="schedule of a round with `intra` on ranks that score and decode: scoring first, or woven "
        "into the bubbles of the decode pipeline (of one stage: between its steps); auto: woven if some rank does both; "
        "or your own function (docs/extending.md)",
    )
    weave: Annotated[list[PositiveInt | Literal["auto"]], Unit("micro-batches, tokens")] = Field(
        default=["auto", "auto"],
        min_length=2,
        max_length=2,
        description="if decoding and scoring share pipeline "
        "stages: decode micro-batches of each replica, and most tokens of a scorer's prefill micro-batch; auto: by "
        "measured times. Fix both if a run must repeat to the bit, because they decide which sequences are computed "
        "together",
    )
    backfill: Annotated[bool | PositiveInt, Unit("decode steps")] = Field(
        False,
        description="with `inter`: new prompts replace finished rollouts within a step; a number gives the "
        "decode steps between two admissions, a multiple of the first `chunk`; true: that number",
    )
    carry: Literal["recompute", "keep", "redraw"] = Field(
        "recompute",
        description="carried responses after an update. recompute: their caches; keep: the caches as they are; redraw: their "
        "tokens too: each is drawn again by the new weights with the same random number, and a response is cut at the first "
        "that differs, so that all its tokens are the new policy's",
    )

    continuous: ContinuousConfig | None = Field(
        None,
        description="with `inter`: decoding does not wait for updates; delta is by default `max_staleness` batches, and fixed",
    )

    without: list[Literal["critic", "scores", "fork"]] = Field(
        default=[],
        description="for measurements: parts that are turned off, without change of the result. critic: with `intra` the "
        "next step waits for the critic's update; scores: with `intra` the forward pass of the actor's update waits for the "
        "last scores; fork: each response computes its prompt itself, in caches and updates",
    )

    def rules(self, batch_size: int, group_size: int = 1) -> Iterator[str]:
        every, tokens = self.backfill, self.chunk_tokens
        if self.continuous is not None and not self.inter:
            yield "overlap.continuous is given, but overlap.inter is false; set inter to true, or remove continuous"
        size = None if self.continuous is None else self.continuous.queue_size
        if size is not None and size < batch_size // group_size:
            yield (
                f"overlap.continuous.queue_size is {size}, but a batch has {batch_size // group_size} prompts and could never be "
                "complete; raise it, or set it to null"
            )
        if every and not self.inter:
            yield f"overlap.backfill is {str(every).lower()}, but overlap.inter is false; set inter to true or backfill to false"
        if not isinstance(every, bool) and every % tokens:
            multiple = -(-every // tokens) * tokens
            yield f"overlap.backfill is {every}, but must be a multiple of overlap.chunk {tokens}; set it to {multiple}"
        delta, sizes, groups = self.delta, self.chunk_sizes, batch_size // group_size
        if self.inter and delta.initial > delta.max:
            yield f"overlap.delta.initial is {delta.initial}, but overlap.delta.max is {delta.max}; lower initial, or raise max"
        if self.inter and delta.max > self.max_staleness * groups:
            of = f" / rollout.group_size {group_size} = {groups} prompts" if group_size > 1 else ""
            yield (
                f"overlap.delta.max is {delta.max}, but must not exceed overlap.max_staleness {self.max_staleness} times "
                f"rollout.batch_size {batch_size}{of} (more prompts could not all be trained in time); lower it, or raise "
                "overlap.max_staleness"
            )
        if len(set(sizes)) < len(sizes):
            yield f"overlap.chunk is {sizes}, but each size may appear once; remove the repeated ones"

    @property
    def admission_period(self) -> int | None:
        """Decode steps between admissions in a step; None: between steps only."""
        if not (self.inter and self.backfill):
            return None
        return self.chunk_tokens if self.backfill is True else self.backfill

    def carries(self, *, filtered: bool) -> bool:
        """True if responses begun in an earlier step may be trained; with a filter, backfill alone carries none."""
        if not self.inter:
            return False
        return max(self.delta.initial, self.delta.max) > 0 or (bool(self.backfill) and not filtered)
