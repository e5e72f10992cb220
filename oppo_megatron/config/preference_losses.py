"""Losses of preferences: of pairs (`oppo dpo`, and `oppo train` with preset online_dpo) and of rows (`oppo kto`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


class PairLossConfig(Section):
    """The loss of a pair of responses (preset online_dpo; docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = Field("sigmoid", description="loss of a pair's margin: DPO, SLiC's hinge, IPO")
    beta: Annotated[float, Unit("")] = Field(
        0.1, gt=0, description="factor of the margin; a larger one keeps the model nearer to the reference"
    )


class DPOLossConfig(PairLossConfig):
    """The loss of a chosen and a rejected answer (docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = Field(  # type: ignore[assignment]
        "sigmoid", description="loss of a pair's margin: DPO, robust DPO, SLiC's hinge, IPO"
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
    nll: Annotated[float, Unit("factor")] = Field(
        0.0, ge=0, description="factor of a second term: the chosen answer's mean negative log-prob per token"
    )

    def rules(self) -> Iterator[str]:
        if self.loss == "robust" and not self.label_smoothing:
            yield (
                "dpo.loss is robust, but dpo.label_smoothing is 0, with which it is sigmoid; set label_smoothing to the share of "
                "pairs that are the wrong way round, or choose sigmoid"
            )
        if self.loss in ("hinge", "ipo") and self.label_smoothing:
            yield (
                f"dpo.label_smoothing is {self.label_smoothing:g}, but dpo.loss {self.loss} has none; remove it, or choose "
                "sigmoid or robust"
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
