"""Held-out prompts, what judges the responses, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.data import DataConfig, RewardPart
from oppo_megatron.config.reward_checks import check_part

if TYPE_CHECKING:
    from oppo_megatron.config.run import SupervisedConfig, TrainConfig, TrainSettings

ACCURACY, RESPONSE_TOKENS, TRUNCATED = "accuracy", "response_tokens", "truncated"
LOSS, MARGIN = "loss", "margin"
REWARD = "reward"
"""The mean reward of a step's batch, where nothing held out names the best step."""

LOWER_IS_BETTER = (LOSS, TRUNCATED)
Direction = Literal["max", "min"]


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


class HeldoutConfig(Section):
    """Rows that are not trained on, and when they are measured: before the first step, after the last and in between."""

    data: DataConfig | None = Field(None, description="files of such rows, read as `data` is; null: a `fraction` of `data`")
    fraction: Annotated[float | None, Unit("of the rows")] = Field(
        None,
        gt=0,
        lt=1,
        description="share of `data` that is held out, drawn by `seed`; rows of one prompt stay together",
    )
    max_rows: Annotated[int, Unit("rows")] = Field(1000, ge=1, description="measure the first so many held-out rows")
    every_steps: int = Field(0, ge=0, description="0: only before the first and after the last step")


class EarlyStopConfig(Section):
    """The run ends where a held-out metric no longer improves."""

    metric: str = Field(
        ...,
        description="a metric of `evaluation`: `accuracy`, the label of a part, `response_tokens`; of sft and rm `loss`, ...",
    )
    mode: Direction | None = Field(
        None, description="whether higher or lower is better; null: lower for `loss` and `truncated`, higher for others"
    )
    patience: Annotated[int, Unit("evaluations")] = Field(
        3, ge=1, description="end after so many evaluations in a row that are no better than the best"
    )
    min_delta: Annotated[float, Unit("of the metric")] = Field(
        0.0, ge=0, description="better means by more than so much"
    )

    @property
    def standard(self) -> Standard:
        return Standard.of(self.metric, self.mode)


class Standard(NamedTuple):
    """By which figure steps are compared, and whether more of it is better."""

    metric: str
    mode: Direction

    @classmethod
    def of(cls, metric: str, mode: Direction | None = None) -> Standard:
        return cls(metric, mode or ("min" if metric in LOWER_IS_BETTER else "max"))

    def gain(self, value: float, over: float) -> float:
        """By how much `value` is better; below 0 it is worse."""
        return value - over if self.mode == "max" else over - value


def best_standard(config: TrainSettings | SupervisedConfig) -> Standard | None:
    """What names the best step: as `checkpoint.best_metric` says, else what stops early, else the first held-out metric.

    Where nothing is measured while the run goes on, it is the mean reward of a step's batch, and of sft and rm nothing.
    """
    rules, names = config.checkpoint, config.measured
    if rules.best_metric is not None:
        return Standard.of(rules.best_metric, rules.best_mode)
    if config.early_stop is not None:
        return config.early_stop.standard
    metric = names[0] if names else config.ALWAYS_MEASURED
    return None if metric is None else Standard.of(metric, rules.best_mode)


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
    return problems + check_standards(config)


def check_heldout(config: SupervisedConfig) -> list[str]:
    """Held-out rows of sft and rm: where they come from, and what goes by their metrics."""
    evaluation = config.evaluation
    if evaluation is not None and (evaluation.data is None) == (evaluation.fraction is None):
        given = "neither" if evaluation.data is None else "both"
        return [
            f"evaluation has {given} of data and fraction, but needs one: files of held-out rows, or the share of `data` that is "
            "held out, as in evaluation.fraction=0.05"
        ]
    return check_standards(config)


def check_standards(config: TrainConfig | SupervisedConfig) -> list[str]:
    """What stops early and what names the best step are metrics that there are, measured while the run goes on."""
    problems, rules = list[str](), config.checkpoint
    if config.early_stop is not None:
        problems += _check_metric("early_stop.metric", config.early_stop.metric, config)
    if rules.best_metric is not None and rules.best_metric != config.ALWAYS_MEASURED:
        problems += _check_metric("checkpoint.best_metric", rules.best_metric, config)
    if rules.keep_best and best_standard(config) is None:
        problems.append(
            "checkpoint.keep_best is true, but nothing is measured while the run goes on; set evaluation.every_steps, and "
            "evaluation.fraction or evaluation.data"
        )
    return problems


def _check_metric(key: str, metric: str, config: TrainConfig | SupervisedConfig) -> list[str]:
    names = config.measured
    if not names:
        return [f"{key} is {metric!r}, but nothing is measured while the run goes on; set evaluation.every_steps"]
    if metric not in names:
        return [f"{key} is {metric!r}, which is no metric of the evaluation; choose from {', '.join(names)}"]
    return []
