"""Configurations of `oppo sft`, `oppo rm` and `oppo dpo`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from oppo_megatron.config.base import Unit
from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.evaluation import ACCURACY, LOSS, PREFERENCE_METRICS, HeldoutConfig
from oppo_megatron.config.model import LearningModelConfig, ModelConfig, OptimizerConfig, TrainedParallelConfig, UsualRate
from oppo_megatron.config.ppo import PairLossConfig
from oppo_megatron.config.run import RunConfig, with_common_dtype


class SupervisedConfig(RunConfig):
    """Settings that `oppo sft`, `oppo rm` and `oppo dpo` share."""

    epochs: Annotated[float, Unit("passes")] = Field(1.0, gt=0, description="passes over the data; may be a fraction")
    batch_size: Annotated[int, Unit("rows")] = Field(32, ge=1, description="rows or pairs per optimizer step")
    max_tokens: int = Field(1024, ge=2, description="longest prompt + completion")
    data: DataConfig
    parallel: TrainedParallelConfig = TrainedParallelConfig()
    model: LearningModelConfig
    evaluation: HeldoutConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        settings = with_common_dtype(data, cls.MODELS)
        rows = settings.get("data") if isinstance(settings, dict) else None
        if not isinstance(rows, dict):
            return settings
        usual = {"long_rows": rows.get("long_rows", "quarantine")}  # of all rows
        settings = settings | {"data": rows | usual}
        evaluation = settings.get("evaluation")
        heldout = evaluation.get("data") if isinstance(evaluation, dict) else None
        if isinstance(heldout, dict):
            settings["evaluation"] = evaluation | {"data": usual | heldout}
        return settings

    MODELS: ClassVar[tuple[str, ...]] = ("model",)
    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-5, 1e-4)
    SCALAR: ClassVar[bool] = False
    """True if the model has a scalar head instead of the language model's."""

    @model_validator(mode="after")
    def _learning_rate(self) -> Self:
        if self.optimizer.lr is None:
            self.optimizer = self.optimizer.with_usual_rate(self.USUAL_RATE, self.model.lora)
        return self

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Models read, by section."""
        found = {name: getattr(self, name) for name in self.MODELS}
        return {name: model for name, model in found.items() if model is not None}

    @property
    def measured(self) -> list[str]:
        """Held-out metrics measured during the run."""
        return list(self.metrics) if self.evaluation is not None and self.evaluation.every_steps else []

    @property
    def metrics(self) -> tuple[str, ...]:
        return PREFERENCE_METRICS

    @property
    def of_pairs(self) -> bool:
        """True for rows of chosen and rejected completions."""
        return True


class SFTConfig(SupervisedConfig):
    """`oppo sft`: next-token loss on completions."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return LOSS, ACCURACY

    @property
    def of_pairs(self) -> bool:
        return False


class RewardModelConfig(SupervisedConfig):
    """`oppo rm`: Bradley-Terry loss on chosen / rejected pairs; with `separator` binary cross-entropy on the labels of steps."""

    separator: str | None = Field(
        None,
        min_length=1,
        description="text between two steps, which makes it a process reward model: rows have steps "
        "with labels, and a step ends with the token that completes it; null: rows are pairs",
    )

    SCALAR = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return PREFERENCE_METRICS if self.of_pairs else (LOSS, ACCURACY)

    @property
    def of_pairs(self) -> bool:
        return self.separator is None


class DPOLossConfig(PairLossConfig):
    """The loss of a pair, or of a completion that is wanted or unwanted (docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "kto", "apo_zero_unpaired"] = Field(  # type: ignore[assignment]
        "sigmoid",
        description="of a pair's margin: DPO, robust DPO, SLiC's hinge, IPO; of a wanted or unwanted completion's "
        "log-ratio: kto (against its mean over mismatched prompts and completions, read before each step), "
        "apo_zero_unpaired (against 0)",
    )
    label_smoothing: Annotated[float, Unit("share of the pairs")] = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs with the wrong order: conservative DPO with sigmoid, unbiased with robust",
    )
    average: bool = Field(
        False, description="compare mean log-probs per token in place of sums, so that long answers weigh no more than short"
    )
    nll: Annotated[float, Unit("factor")] = Field(0.0, ge=0, description="factor of the chosen answer's mean NLL per token")

    wanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of wanted completions")
    unwanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of unwanted completions")

    @property
    def of_pairs(self) -> bool:
        """True for a loss of pairs."""
        return self.loss not in ("kto", "apo_zero_unpaired")

    def rules(self) -> Iterator[str]:
        for name in ("wanted", "unwanted") if self.of_pairs else ("label_smoothing", "average", "nll"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield (
                    f"dpo.{name} is {json.dumps(value)}, but dpo.loss {self.loss} is of "
                    f"{'pairs' if self.of_pairs else 'single completions'} and does not read it; remove it"
                )
        if self.loss == "robust" and not self.label_smoothing:
            yield (
                "dpo.loss is robust, but dpo.label_smoothing is 0, so that it is sigmoid; set label_smoothing to the share of "
                "pairs that are the wrong way round, or choose sigmoid"
            )
        if self.loss in ("hinge", "ipo") and self.label_smoothing:
            yield (
                f"dpo.label_smoothing is {self.label_smoothing:g}, but dpo.loss {self.loss} has none; remove it, or choose "
                "sigmoid or robust"
            )


class DPOConfig(SupervisedConfig):
    """`oppo dpo`: chosen / rejected pairs or, by the loss, completions that are wanted or unwanted."""

    dpo: DPOLossConfig = DPOLossConfig()
    reference: ModelConfig | None = Field(
        None, description="the model that log-probs are compared with; null: the starting weights, `lora.adapter` included"
    )
    reference_logprobs: Path | None = Field(
        None,
        description="file of the reference's log-probs, made if it is missing, for all runs with the same "
        "reference; null: `reference.safetensors` in the run directory",
    )

    MODELS: ClassVar[tuple[str, ...]] = ("model", "reference")
    USUAL_RATE: ClassVar[UsualRate] = UsualRate(1e-6, 1e-5)

    @property
    def of_pairs(self) -> bool:
        return self.dpo.of_pairs
