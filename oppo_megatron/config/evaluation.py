"""Held-out data, the judges of responses, and early stopping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import DataConfig, PromptDataConfig, RowsConfig
from oppo_megatron.config.rewards import RewardPart, part_labels

ACCURACY, RESPONSE_TOKENS, TRUNCATED = "accuracy", "response_tokens", "truncated"
LOSS = "loss"
PREFERENCE_METRICS = (LOSS, ACCURACY, "margin")
FORMS = ("format", "length")
"""Rules that look at the form of a response, and not at its answer."""
REWARD = "reward"
"""The mean reward of a step's batch."""

PAPER_TASKS = ("arc_challenge@25", "arc_easy@25", "hellaswag@10", "truthfulqa_mc2@0", "gsm8k@5")
"""The preset `paper`: the paper's tasks with the shots of its appendix A.1."""

LOWER_IS_BETTER = (LOSS, TRUNCATED)
Direction = Literal["max", "min"]


class MeasuringConfig(Section):
    """Measurements before the first step, after the last and in between."""

    data: RowsConfig | None = Field(None, description="files of held-out rows, read as `data` is")
    every_steps: int = Field(0, ge=0, description="0: only before the first and after the last step")


class EvaluationConfig(MeasuringConfig):
    """Held-out prompts, answered before the first step, after the last and in between."""

    data: PromptDataConfig = Field(..., description="files of held-out prompts; without `max_rows` the first 200 are used")
    metrics: list[RewardPart] = Field(
        ...,
        min_length=1,
        description="judges of the responses: parts as under `rewards`, each a metric, whatever its weight; the first "
        "verifier of answers is the metric `accuracy`; `model` and `process` are the run's reward model",
    )
    samples: Annotated[int, Unit("responses")] = Field(1, ge=1, description="responses per prompt")
    temperature: Annotated[float, Unit("")] = Field(0.0, ge=0, description="0: the likeliest token each time")

    tasks: list[Annotated[str, Field(pattern=r"^[^@\s]+(@\d+)?$")]] = Field(
        [],
        description="tasks of lm-evaluation-harness, each a metric: NAME, or NAME@SHOTS; `paper`: the paper's five. As many "
        "documents as held-out prompts are read",
    )
    task_data: Path | None = Field(None, description="folder with the tasks' data sets; what it lacks is fetched by its name")

    @property
    def most_rows(self) -> int:
        return self.data.max_rows or 200

    @property
    def names(self) -> list[str]:
        """Names of `metrics`, those that every evaluation measures, and `tasks`."""
        return [*self.judged, *all_tasks(self.tasks)]

    @property
    def judged(self) -> list[str]:
        labels = part_labels(self.metrics)
        answers = (place for place, part in enumerate(self.metrics) if part.kind == "verifier" and part.name not in FORMS)
        if (first := next(answers, None)) is not None:
            labels[first] = ACCURACY
        return [*labels, RESPONSE_TOKENS, TRUNCATED]


def all_tasks(names: Sequence[str]) -> list[str]:
    """Replace the preset by its tasks; each task once."""
    return list(dict.fromkeys(task for name in names for task in (PAPER_TASKS if name == "paper" else (name,))))


class HeldoutConfig(MeasuringConfig):
    """Held-out rows, measured before the first step, after the last and in between."""

    data: DataConfig | None = Field(None, description="files of held-out rows; null: a `fraction` of `data`")
    fraction: Annotated[float | None, Unit("of the rows")] = Field(
        None, gt=0, lt=1, description="held-out share of `data`, drawn by `seed`; rows of one prompt stay together"
    )
    max_rows: Annotated[int, Unit("rows")] = Field(1000, ge=1, description="measure at most this many held-out rows")

    @property
    def most_rows(self) -> int:
        return self.max_rows


class EarlyStopConfig(Section):
    """The run ends once a held-out metric no longer improves."""

    metric: str = Field(
        ...,
        description="a metric of `evaluation`: `accuracy`, the label of a part, `response_tokens`; for "
        "supervised training `loss`, `accuracy`, `margin`. Lower is better for `loss` and `truncated`; `min toxicity` "
        "and `max length` override this",
    )
    patience: Annotated[int, Unit("evaluations")] = Field(
        3, ge=1, description="end after this many consecutive evaluations that do not beat the best"
    )

    @property
    def standard(self) -> Standard:
        return Standard.of(self.metric)


class Standard(NamedTuple):
    """The figure that compares steps, and its better direction."""

    metric: str
    mode: Direction

    @classmethod
    def of(cls, text: str) -> Standard:
        """`min ` or `max ` may precede the metric."""
        if text.startswith("min "):
            return cls(text.removeprefix("min "), "min")
        metric = text.removeprefix("max ")
        return cls(metric, "min" if metric == text and metric in LOWER_IS_BETTER else "max")

    def gain(self, value: float, over: float) -> float:
        return value - over if self.mode == "max" else over - value
