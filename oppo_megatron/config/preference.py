"""Configuration of preference training: `oppo dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from oppo_megatron.config.model import ModelConfig, UsualRate
from oppo_megatron.config.preference_losses import DPOLossConfig
from oppo_megatron.config.run import SupervisedConfig


class DPOConfig(SupervisedConfig):
    """`oppo dpo`: chosen / rejected pairs or, by the loss, completions that are wanted or unwanted."""

    dpo: DPOLossConfig = DPOLossConfig()
    reference: ModelConfig | None = Field(
        None,
        description="the model that log-probs are compared with; null: the model's starting weights, `lora.adapter` included",
    )
    reference_logprobs: Path | None = Field(
        None,
        description="file of the reference's log-probs, made if it is missing and used by every run whose reference is the "
        "same; null: `reference.safetensors` in the run directory",
    )

    MODELS: ClassVar[tuple[str, ...]] = ("model", "reference")
    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-6, 1e-5)

    @property
    def of_pairs(self) -> bool:
        return self.dpo.of_pairs

    @property
    def referred(self) -> ModelConfig:
        """The model that the reference is made from."""
        return self.model if self.reference is None else self.reference
