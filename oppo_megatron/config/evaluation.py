"""Held-out prompts, what judges the responses, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import DataConfig, RewardPart

ACCURACY, RESPONSE_TOKENS, TRUNCATED = "accuracy", "response_tokens", "truncated"
LOSS, MARGIN = "loss", "margin"
REWARD = "reward"
"""The mean reward of a step's batch, where nothing held out names the best step."""

LOWER_IS_BETTER = (LOSS, TRUNCATED)
Direction = Literal["max", "min"]


class MeasuringConfig(Section):
    """What is measured before the first step, after the last and in between."""

    data: DataConfig | None = Field(None, description="files of held-out rows, read as `data` is")
    max_rows: Annotated[int, Unit("rows")] = Field(1000, ge=1, description="use the first so many held-out rows")
    every_steps: int = Field(0, ge=0, description="0: only before the first and after the last step")


class EvaluationConfig(MeasuringConfig):
    """Held-out prompts, answered before the first step, after the last and in between, and what judges the responses."""

    data: DataConfig
    verifier: Literal["arithmetic", "gsm8k"] | None = Field(
        None, description="the rule whose share of right responses is the metric `accuracy`; null: only `metrics`; "
        "the expected answer is column `answer`"
    )
    metrics: list[RewardPart] = Field(
        default_factory=list,
        description="parts as under `rewards`, each a metric of its own, whatever its weight; `model` is the run's reward model",
    )
    samples: Annotated[int, Unit("responses")] = Field(1, ge=1, description="responses a prompt")
    temperature: Annotated[float, Unit("")] = Field(0.0, ge=0, description="0: the likeliest token each time")
    max_rows: Annotated[int, Unit("rows")] = Field(200, ge=1, description="use the first so many prompts")

    @property
    def judges(self) -> list[RewardPart]:
        """Every judge as a part; the metric of `verifier` comes first."""
        rule = [RewardPart(kind="verifier", name=self.verifier)] if self.verifier else []
        return rule + self.metrics

    @property
    def names(self) -> list[str]:
        """Of the metrics, in the order of `judges`; then of what every evaluation measures."""
        labels = part_labels(self.judges)
        return [ACCURACY if self.verifier else labels[0], *labels[1:], RESPONSE_TOKENS, TRUNCATED]


class HeldoutConfig(MeasuringConfig):
    """Rows that are not trained on, and when they are measured: before the first step, after the last and in between."""

    data: DataConfig | None = Field(None, description="files of such rows, read as `data` is; null: a `fraction` of `data`")
    fraction: Annotated[float | None, Unit("of the rows")] = Field(
        None,
        gt=0,
        lt=1,
        description="share of `data` that is held out, drawn by `seed`; rows of one prompt stay together",
    )


class EarlyStopConfig(Section):
    """The run ends where a held-out metric no longer improves."""

    metric: str = Field(
        ...,
        description="a metric of `evaluation`: `accuracy`, the label of a part, `response_tokens`; of sft and rm `loss`, ... "
        "Lower is better for `loss` and `truncated`, higher for others; `min toxicity` and `max length` say otherwise",
    )
    patience: Annotated[int, Unit("evaluations")] = Field(
        3, ge=1, description="end after so many evaluations in a row that are no better than the best"
    )

    @property
    def standard(self) -> Standard:
        return Standard.of(self.metric)


class Standard(NamedTuple):
    """By which figure steps are compared, and whether more of it is better."""

    metric: str
    mode: Direction

    @classmethod
    def of(cls, text: str) -> Standard:
        """Of a metric, which `min ` or `max ` may stand before."""
        if text.startswith("min "):
            return cls(text.removeprefix("min "), "min")
        metric = text.removeprefix("max ")
        return cls(metric, "min" if metric == text and metric in LOWER_IS_BETTER else "max")

    def gain(self, value: float, over: float) -> float:
        """By how much `value` is better; below 0 it is worse."""
        return value - over if self.mode == "max" else over - value


def part_labels(parts: Sequence[RewardPart]) -> list[str]:
    """What each part is called in figures and errors."""
    labels: list[str] = []
    for part in parts:
        address = (part.url or "").partition("://")[2]
        name = {"model": "model", "verifier": part.name, "python": part.entry_point, "http": address}[part.kind] or ""
        labels.append(name if name not in labels else f"{name}#{len(labels) + 1}")
    return labels
