"""Losses of preferences: `oppo dpo`, and `oppo train` with preset online_dpo."""

from __future__ import annotations

import json
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
    """The loss of a pair, or of a completion that is wanted or unwanted (docs/preferences.md has the formulas)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "kto", "apo_zero_unpaired"] = Field(  # type: ignore[assignment]
        "sigmoid",
        description="of a pair's margin: DPO, robust DPO, SLiC's hinge, IPO; of a wanted or unwanted completion's log-ratio: kto "
        "(against its mean over mismatched prompts and completions, read before each step), apo_zero_unpaired (against 0)",
    )
    label_smoothing: Annotated[float, Unit("share of the pairs")] = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="assumed share of pairs with the wrong order: conservative DPO with sigmoid, unbiased with robust",
    )
    average: bool = Field(
        False,
        description="compare mean log-probs per token of a pair's answers in place of sums, so that long answers weigh no more "
        "than short",
    )
    nll: Annotated[float, Unit("factor")] = Field(
        0.0, ge=0, description="factor of a second term: the chosen answer's mean negative log-prob per token"
    )
    wanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of wanted completions")
    unwanted: Annotated[float, Unit("factor")] = Field(1.0, gt=0, description="weight of unwanted completions")

    @property
    def of_pairs(self) -> bool:
        """True for a loss of pairs, False for one of single completions."""
        return self.loss not in ("kto", "apo_zero_unpaired")

    def rules(self) -> Iterator[str]:
        """Yield a sentence for each setting that the loss does not read, and if robust lacks its share of wrong pairs."""
        unread = ("wanted", "unwanted") if self.of_pairs else ("label_smoothing", "average", "nll")
        for name in unread:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield (
                    f"dpo.{name} is {json.dumps(value)}, but dpo.loss {self.loss} is of "
                    f"{'pairs' if self.of_pairs else 'single completions'} and does not read it; remove it"
                )
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
