"""Settings of low-rank adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained; the model's own weights stay as they are.

    y = W x + alpha / rank * B A x for each target, in every layer.  Without dropout, so that log-probs in training equal
    those of decoding.
    """

    rank: Annotated[int, Unit("rows")] = Field(16, ge=1, description="rows of A and columns of B")
    alpha: Annotated[float, Unit("")] = Field(32.0, gt=0, description="the adapters' weight, divided by the rank")
    targets: Annotated[list[LoraTarget], Field(min_length=1)] | None = Field(
        None, description="projections that have adapters, by their Hugging Face names; null: all seven"
    )
    adapter: Path | None = Field(
        None,
        description="peft directory to start from, of this rank, alpha and targets; null: A drawn by init_seed, B zero",
    )

    @field_validator("targets")
    @classmethod
    def _in_order(cls, value: list[LoraTarget] | None) -> list[LoraTarget] | None:
        if value is None:
            return None
        if len(set(value)) < len(value):
            raise ValueError("each target once")
        return [target for target in TARGETS if target in value]

    @property
    def projections(self) -> list[LoraTarget]:
        return list(TARGETS) if self.targets is None else self.targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
