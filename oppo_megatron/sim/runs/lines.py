"""Metrics and files of a virtual run, as in a real one, without fields that need a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, read_metrics, summarise
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces
from oppo_megatron.sim.runs.virtual import VirtualStep

ROUNDED = 9
"""Decimal places: nanoseconds."""


def metrics_lines(steps: Sequence[VirtualStep]) -> Iterator[dict[str, Any]]:
    """Yield a line per step (docs/metrics.md). A line has the delay that its critic's update causes in the next step; the
    last of `steps` counts as the run's last.
    """
    for step, after in pairwise([*steps, None]):
        assert step is not None
        update_s = step.line["critic_update_s"]
        exposed_s = min(update_s, step.waited_s + (step.lag_s if after is None else after.critic_delay_s))
        yield _rounded({**step.line, "critic_exposed_s": exposed_s, "critic_hidden_s": update_s - exposed_s})


def write_run(
    config: TrainConfig, path: Path, lines: Sequence[dict[str, Any]], spans: Sequence[Span], about: Sequence[str]
) -> None:
    run = RunDirectory(path).prepare()
    run.config.write_text(config_yaml(config.model_copy(update={"run_dir": path})) + "\n", encoding="utf-8")
    with MetricsLog(run.metrics) as log:
        for line in lines:
            log.write(line["step"], {key: value for key, value in line.items() if key != "step"})
    recorders = {rank: SpanRecorder(rank, path) for rank in sorted({span.rank for span in spans})}
    for span in spans:
        recorders[span.rank].write(span)
    for recorder in recorders.values():
        recorder.flush()
    merge_traces(path)
    total_s = lines[-1]["time_s"]
    write_json(run.summary, summarise(read_metrics(run.metrics)) | {"total_s": total_s, "simulated": list(about)})


def _rounded(value: Any) -> Any:
    """Round to nanoseconds, so that lines can be compared."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, ROUNDED) if isinstance(value, float) else value
