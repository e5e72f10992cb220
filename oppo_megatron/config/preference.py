"""Configurations of preference training: `oppo dpo` and `oppo kto`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.evaluation import ACCURACY, LOSS, MARGIN
from oppo_megatron.config.model import ModelConfig, UsualRate
from oppo_megatron.config.run import SupervisedConfig


class DPOLossConfig(Section):
    """The loss of a pair (docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = Field(
        "sigmoid", description="loss of a pair's margin: DPO, robust DPO, SLiC's hinge, IPO"
    )
    beta: Annotated[float, Unit("")] = Field(
        0.1, gt=0, description="factor of the margin; the larger, the nearer the model stays to the reference"
    )
    label_smoothing: Annotated[float, Unit("share of the pairs")] = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="share of pairs that are taken to be the wrong way round: conservative DPO with sigmoid, unbiased "
        "with robust",
    )
    average: bool = Field(
        False,
        description="margins of the mean log-prob a token in place of the sum, so that long answers weigh no more than short",
    )
    nll: Annotated[float, Unit("factor")] = Field(
        0.0, ge=0, description="factor of a second term: the chosen answer's negative log-prob, by its mean a token"
    )


class KTOLossConfig(Section):
    """The loss of a row that is wanted or unwanted (docs/preferences.md has the formulas)."""

    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="kto: against the mean log-ratio of mismatched prompts and completions, which are read before each step; "
        "apo_zero_unpaired: against 0, without these",
    )
    beta: Annotated[float, Unit("")] = Field(
        0.1, gt=0, description="factor of the log-ratio; the larger, the nearer the model stays to the reference"
    )
    wanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of wanted completions")
    unwanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of unwanted completions")


class PreferenceConfig(SupervisedConfig):
    """Settings that `oppo dpo` and `oppo kto` share."""

    reference: ModelConfig | None = Field(
        None,
        description="the model that log-probs are compared with; null: the model's starting weights, `lora.adapter` included",
    )
    reference_logprobs: Path | None = Field(
        None,
        description="file of the reference's log-probs, made where it is missing and used by every run whose reference is the "
        "same; null: `reference.safetensors` in the run directory",
    )

    METRICS = (LOSS, ACCURACY, MARGIN)
    MODELS: ClassVar[tuple[str, ...]] = ("model", "reference")
    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-6, 1e-5)

    @property
    def referred(self) -> ModelConfig:
        """What the reference is made from."""
        return self.model if self.reference is None else self.reference


class DPOConfig(PreferenceConfig):
    """`oppo dpo`: chosen / rejected pairs, without a reward model."""

    dpo: DPOLossConfig = DPOLossConfig()


class KTOConfig(PreferenceConfig):
    """`oppo kto`: completions that are wanted or unwanted."""

    kto: KTOLossConfig = KTOLossConfig()
