"""Colocated roles, their rounds woven or not: each rank's idle share of a rollout, from traces of every action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from oppo_megatron.bench.figures import figures, speedups
from oppo_megatron.bench.pictures import draw_weave
from oppo_megatron.bench.suite import Suite, all_lines, require_same_work, require_scorers, work_figures
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ScheduleError
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace
from oppo_megatron.schedule.actions import Op, parse_action

WEAVES: dict[str, dict[str, Any]] = {
    "sequential": {"intra": False},
    "unwoven": {"intra": True, "schedule": "intra"},
    "woven": {"intra": True, "schedule": "woven"},
}
"""Switches of `overlap` by name."""
COLUMNS = {
    "mode": "mode", "rounds s": "rounds_s", "bubble %": "bubble_percent", "s/step": "step_s",
    "tokens/s": "tokens_per_s", "x seq": "speedup_step_s", "total s": "total_s", "bubble % by rank": "bubble_by_rank",
}  # fmt: skip
WORKING = {Op.DECODE, Op.SAMPLE, Op.PREFILL, Op.SCORE}


def bench_weave(suite: Suite, config: TrainConfig, modes: Sequence[str]) -> dict[str, Any]:
    """Run the modes, every action traced.  Writes weave.json and weave.png."""
    require_scorers(config, "nothing is woven into the decoding")
    logging = config.logging.model_copy(update={"trace": "actions"})
    traced = config.model_copy(update={"logging": logging})
    configs = {
        mode: traced.model_copy(update={"overlap": config.overlap.model_copy(update=WEAVES[mode])}) for mode in modes
    }
    runs = suite.run(configs)
    rows = [
        {"mode": mode, **figures(all_lines(turns)), **weave_figures([run.path for run in turns])}
        for mode, turns in runs.items()
    ]
    plain = next((row for row in rows if row["mode"] == "sequential"), None)
    for row in rows:
        row |= speedups(row, plain, "speedup")
    result = {"results": rows, **work_figures(runs)}
    suite.write("weave", config, result, runs)
    draw_weave(rows, suite.out / "weave.png")
    require_same_work(config, result)
    return result


def weave_figures(runs: Sequence[Path]) -> dict[str, Any]:
    """Medians over the steps after the first of all runs: seconds of the rounds (decoding, and the scoring that comes after
    it), and the share of them that the ranks did not work."""
    steps = [step for run in runs for step in _steps(read_trace(RunDirectory(run).trace))]
    return {
        "rounds_s": median(step["rounds_s"] for step in steps),
        "bubble_percent": 100 * median(step["bubble"] for step in steps),
        "bubble_by_rank": [
            100 * median(step["by_rank"][rank] for step in steps) for rank in sorted(steps[0]["by_rank"])
        ],
    }


def _steps(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Of each step after the first, or of the first where there is no other: seconds from the first to the last action of
    all ranks, and idle shares."""
    by_step: dict[int, dict[int, list[Span]]] = {}
    for span in spans:
        if _is_action(span):
            by_step.setdefault(span.step, {}).setdefault(span.rank, []).append(span)
    figures_by_step = [_idle(ranks) for _, ranks in sorted(by_step.items())]
    return figures_by_step[1:] or figures_by_step


def _idle(ranks: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    start = min(span.start for spans in ranks.values() for span in spans)
    window = max(span.end for spans in ranks.values() for span in spans) - start
    busy = {rank: sum(s.end - s.start for s in spans if _works(s)) for rank, spans in ranks.items()}
    return {
        "rounds_s": window,
        "bubble": 1 - sum(busy.values()) / (window * len(busy)),
        "by_rank": {rank: 1 - seconds / window for rank, seconds in busy.items()},
    }


def _works(span: Span) -> bool:
    return parse_action(span.rank, span.name).op in WORKING


def _is_action(span: Span) -> bool:
    try:
        parse_action(span.rank, span.name)
    except ScheduleError:
        return False  # a span of the loop: an update, a wait for scores
    return True
