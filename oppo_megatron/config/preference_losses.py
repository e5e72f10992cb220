"""Losses of preferences: of pairs (`oppo dpo`, and `oppo train` with preset online_dpo) and of rows (`oppo kto`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


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
