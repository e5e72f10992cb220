"""Configurations of preference training: `oppo dpo` and `oppo kto`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from oppo_megatron.config.evaluation import ACCURACY, LOSS, MARGIN
from oppo_megatron.config.model import ModelConfig, UsualRate
from oppo_megatron.config.preference_losses import DPOLossConfig, KTOLossConfig
from oppo_megatron.config.run import SupervisedConfig


class PreferenceConfig(SupervisedConfig):
    """Settings that `oppo dpo` and `oppo kto` share."""

    reference: ModelConfig | None = Field(
        None,
        description="the model that log-probs are compared with; null: the model's starting weights, `lora.adapter` included",
    )
    reference_logprobs: Path | None = Field(
        None,
        description="file of the reference's log-probs, made if it is missing and used by every run whose reference is the "
        "same; null: `reference.safetensors` in the run directory",
    )

    METRICS = (LOSS, ACCURACY, MARGIN)
    MODELS: ClassVar[tuple[str, ...]] = ("model", "reference")
    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-6, 1e-5)

    @property
    def referred(self) -> ModelConfig:
        """The model that the reference is made from."""
        return self.model if self.reference is None else self.reference


class DPOConfig(PreferenceConfig):
    """`oppo dpo`: chosen / rejected pairs, without a reward model."""

    dpo: DPOLossConfig = DPOLossConfig()


class KTOConfig(PreferenceConfig):
    """`oppo kto`: completions that are wanted or unwanted."""

    kto: KTOLossConfig = KTOLossConfig()
