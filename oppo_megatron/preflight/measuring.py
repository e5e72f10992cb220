"""Checks of held-out metrics, and of the settings that depend on them."""

from __future__ import annotations

from oppo_megatron.config.derived import best_standard
from oppo_megatron.config.evaluation import Standard
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.preflight.reward_parts import check_part


def check_evaluation(config: TrainConfig) -> list[str]:
    """Each judge has what its kind needs; what goes by a metric names one that there is, measured while the run goes on."""
    evaluation, problems = config.evaluation, list[str]()
    if evaluation is not None:
        for index, part in enumerate(evaluation.metrics):
            problems += check_part(f"evaluation.metrics.{index}", part)
        if not evaluation.judges:
            return [*problems, "evaluation has neither verifier nor metrics; say what judges a response"]
        models = sum(part.reads_model for part in evaluation.metrics)
        if models > 1:
            problems.append("evaluation.metrics names the reward model more than once; once is enough")
        if models and config.reward is None:
            problems.append(
                "evaluation.metrics has a part of kind model or process, but the run has no reward model; add one to `rewards`, "
                "or ask a service (`oppo serve`) with kind http"
            )
        elif kind := next((part.kind for part in evaluation.metrics if part.reads_model), None):
            trained = next((part.kind for part in config.rewards if part.reads_model), kind)
            if kind != trained:
                problems.append(
                    f"evaluation.metrics has a part of kind {kind}, but in `rewards` the reward model has kind {trained}; write "
                    f"kind {trained}"
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
    if isinstance(rules.keep_best, str) and rules.keep_best != config.ALWAYS_MEASURED:
        problems += _check_metric("checkpoint.keep_best", rules.keep_best, config)
    if rules.keep_best is True and best_standard(config) is None:
        problems.append(
            "checkpoint.keep_best is true, but nothing is measured while the run goes on; set evaluation.every_steps, and "
            "evaluation.fraction or evaluation.data"
        )
    return problems


def _check_metric(key: str, text: str, config: TrainConfig | SupervisedConfig) -> list[str]:
    names, metric = config.measured, Standard.of(text).metric
    if not names:
        return [f"{key} is {metric!r}, but nothing is measured while the run goes on; set evaluation.every_steps"]
    if metric not in names:
        return [f"{key} is {metric!r}, which is no metric of the evaluation; choose from {', '.join(names)}"]
    return []
