"""Held-out prompts, what judges the responses, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import DataConfig, RewardPart
from oppo_megatron.config.reward_checks import check_part

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig

ACCURACY, RESPONSE_TOKENS, TRUNCATED = "accuracy", "response_tokens", "truncated"


class EvaluationConfig(Section):
    """Held-out prompts, answered before the first step, after the last and in between, and what judges the responses."""

    data: DataConfig
    verifier: Literal["arithmetic", "gsm8k"] | None = Field(
        None, description="the rule whose share of right responses is the metric `accuracy`; null: only `metrics`"
    )
    answer: str = Field("answer", description="column that holds the expected answer (`verifier`)")
    metrics: list[RewardPart] = Field(
        default_factory=list,
        description="parts as under `rewards`, each a metric of its own, whatever its weight; `model` is the run's reward model",
    )
    samples: Annotated[int, Unit("responses")] = Field(1, ge=1, description="responses a prompt")
    temperature: Annotated[float, Unit("")] = Field(0.0, ge=0, description="0: the likeliest token each time")
    max_prompts: Annotated[int, Unit("prompts")] = Field(200, ge=1, description="use the first so many prompts")
    every_steps: int = Field(0, ge=0, description="0: only before the first and after the last step")

    @property
    def judges(self) -> list[RewardPart]:
        """Every judge as a part; the metric of `verifier` comes first."""
        rule = [RewardPart(kind="verifier", name=self.verifier, answer=self.answer)] if self.verifier else []
        return rule + self.metrics

    @property
    def names(self) -> list[str]:
        """Of the metrics, in the order of `judges`; then of what every evaluation measures."""
        labels = part_labels(self.judges)
        return [ACCURACY if self.verifier else labels[0], *labels[1:], RESPONSE_TOKENS, TRUNCATED]


class EarlyStopConfig(Section):
    """The run ends where a held-out metric no longer improves."""

    metric: str = Field(..., description="a metric of `evaluation`: `accuracy`, the label of a part, `response_tokens`")
    mode: Literal["max", "min"] = Field("max", description="whether higher or lower is better")
    patience: Annotated[int, Unit("evaluations")] = Field(
        3, ge=1, description="end after so many evaluations in a row that are no better than the best"
    )
    min_delta: Annotated[float, Unit("of the metric")] = Field(
        0.0, ge=0, description="better means by more than so much"
    )


def part_labels(parts: Sequence[RewardPart]) -> list[str]:
    """What each part is called in figures and errors."""
    labels: list[str] = []
    for part in parts:
        address = (part.url or "").partition("://")[2]
        name = {"model": "model", "verifier": part.name, "python": part.entry_point, "http": address}[part.kind] or ""
        labels.append(name if name not in labels else f"{name}#{len(labels) + 1}")
    return labels


def check_evaluation(config: TrainConfig) -> list[str]:
    """Each judge has what its kind needs; what goes by a metric names one that there is, measured while the run goes on."""
    evaluation, problems = config.evaluation, list[str]()
    if evaluation is not None:
        for index, part in enumerate(evaluation.metrics):
            problems += check_part(f"evaluation.metrics.{index}", part)
        if not evaluation.judges:
            return [*problems, "evaluation has neither verifier nor metrics; say what judges a response"]
        models = sum(part.kind == "model" for part in evaluation.metrics)
        if models > 1:
            problems.append("evaluation.metrics names the reward model more than once; once is enough")
        if models and config.reward is None:
            problems.append(
                "evaluation.metrics has a part of kind model, but the run has no reward model; add one to `rewards`, or ask a "
                "service (`oppo serve-reward`) with kind http"
            )
        if evaluation.samples > 1 and evaluation.temperature == 0:
            problems.append(
                f"evaluation.samples is {evaluation.samples}, but greedy responses are all the same; set evaluation.temperature"
            )
    if config.early_stop is not None:
        problems += _check_metric("early_stop.metric", config.early_stop.metric, evaluation)
    return problems


def _check_metric(key: str, metric: str, evaluation: EvaluationConfig | None) -> list[str]:
    if evaluation is None or not evaluation.every_steps:
        return [f"{key} is {metric!r}, but nothing is measured while the run goes on; set evaluation.every_steps"]
    if metric not in evaluation.names:
        return [f"{key} is {metric!r}, which is no metric of the evaluation; choose from {', '.join(evaluation.names)}"]
    return []
