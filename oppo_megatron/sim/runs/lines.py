"""Metrics and files of a virtual run, as in a real one, without fields that need a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oppo_megatron.config.derived import members
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import MetricsLog, read_metrics, summarise
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces
from oppo_megatron.sim.runs.virtual import VirtualStep

ROUNDED = 9
"""Decimal places: nanoseconds."""


def metrics_lines(config: TrainConfig, steps: Sequence[VirtualStep]) -> Iterator[dict[str, Any]]:
    """Yield a line per step (docs/metrics.md). A line has the delay that its critic's update causes in the next step; the
    last of `steps` counts as the run's last.
    """
    size = members(config).trained
    for step, after in pairwise([*steps, None]):
        assert step is not None
        yield _rounded(_line(step, after, size))


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


def _line(step: VirtualStep, after: VirtualStep | None, group_size: int) -> dict[str, Any]:
    facts, parts, lengths = step.facts, step.parts, step.lengths
    update_s, waited_s = facts["critic_update_s"], facts["wait_update_s"]
    waited_s += facts["lag_s"] if after is None else after.facts["critic_delay_s"]
    critic_s = update_s if facts["shares_ranks"] else min(update_s, waited_s)
    busy_s, exposed_s, count = facts["score_busy_s"], facts["score_exposed_s"], len(lengths)
    of_groups = lengths.reshape(-1, group_size)
    submitted = (int(lengths.sum()) + facts["carried_tokens"]) / (count + facts["carried"])
    return {
        "step": step.step, "time_s": step.begun_s + step.step_s, "step_s": step.step_s, "decode_s": facts["decode_s"],
        "score_exposed_s": exposed_s, "score_hidden_s": max(0.0, busy_s - exposed_s), "score_busy_s": busy_s,
        "train_s": parts.update_s + parts.reallocate_s, "reallocate_s": parts.reallocate_s,
        "idle_s": {"actor": facts["wait_scores_s"] + facts["wait_update_s"], "scorer": facts["scorer_idle_s"]},
        "critic_update_s": update_s, "critic_exposed_s": critic_s, "critic_hidden_s": update_s - critic_s,
        "tokens": step.tokens, "prefilled_tokens": facts["prefilled_tokens"], "forked_tokens": facts["forked_tokens"],
        "running_mean": step.tokens / step.decode_steps if step.decode_steps else 0.0, "tail_waste": facts["tail_waste"],
        "delta": step.delta, "delta_reason": facts["delta_reason"],
        "chunk_tokens": step.chunk_tokens, "chunk_reason": facts["chunk_reason"],
        "deferred": {str(times): number for times, number in sorted(Counter(step.deferrals.tolist()).items())},
        "carried": facts["carried"], "carried_finished": facts["carried_finished"], "backfilled": facts["backfilled"],
        "prompt_len_mean": facts["prompt_len_mean"],
        "trained_len_mean": float(lengths.mean()), "trained_len_max": int(lengths.max()),
        "submitted_len_mean": submitted, "length_gap": facts["length_gap"],
        "group_length_gap": float(np.mean(1 - of_groups.mean(1) / of_groups.max(1))) if group_size > 1 else None,
        "skipped": None,
    }  # fmt: skip


def _rounded(value: Any) -> Any:
    """Round to nanoseconds, so that lines can be compared."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, ROUNDED) if isinstance(value, float) else value
