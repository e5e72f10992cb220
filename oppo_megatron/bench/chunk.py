"""Chunk sizes, fixed and adaptive, against seconds a step (the paper's Figure 7b)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from oppo_megatron.bench.figures import figures
from oppo_megatron.bench.limit import run_with_limits
from oppo_megatron.bench.pictures import draw_chunks
from oppo_megatron.bench.suite import (
    Lines,
    Run,
    Runs,
    Suite,
    all_lines,
    require_same_work,
    require_scorers,
    work_figures,
)
from oppo_megatron.config.derived import longest_chunk
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import first_settled_step
from oppo_megatron.errors import ConfigError

SIZES = (8, 16, 32, 64, 128)
ADAPTIVE = "adaptive"
COLUMNS = {
    "chunk": "chunk", "s/step": "step_s", "decode": "decode_s", "exp. scoring": "score_exposed_s",
    "%": "score_exposed_percent", "tokens/s": "tokens_per_s", "total s": "total_s", "x best fixed": "over_best",
}  # fmt: skip


def bench_chunk(
    suite: Suite, config: TrainConfig, sizes: Sequence[int], adaptive: bool, limit_cores: int | None = None
) -> dict[str, Any]:
    """Run the configuration with each size, and with the tuner.  Writes chunk.json and chunk.png.

    `limit_cores`: add the least time that the work can take on so many cores; None: no limit.  Raises ConfigError where
    chunks have no meaning, or none of the sizes is within the response limit.
    """
    configs = chunk_configs(config, sizes, adaptive)
    runs, limits = run_with_limits(suite, configs, limit_cores)
    result = compare(configs, runs) | work_figures(runs) | limits
    suite.write("chunk", config, result, runs)
    draw_chunks(result, suite.out / "chunk.png")
    require_same_work(config, result)
    return result


def chunk_configs(config: TrainConfig, sizes: Sequence[int], adaptive: bool) -> dict[str, TrainConfig]:
    """The configurations by name: the size, or `adaptive`, which is the configuration's own tuner."""
    if not config.overlap.intra:
        raise ConfigError(
            "overlap.intra is false: without streamed scoring a chunk's size decides nothing; set overlap.intra=true"
        )
    require_scorers(config, "a chunk's size decides nothing")
    longest = config.rollout.max_response_tokens
    fitting = [size for size in sizes if size <= longest]
    if not fitting:
        raise ConfigError(
            f"--sizes {', '.join(map(str, sizes))}: none is within rollout.max_response_tokens, {longest}; give one that is"
        )
    chunks: dict[str, dict[str, Any]] = {str(size): {"tokens": size, "adaptive": False} for size in fitting}
    if adaptive:
        chunks[ADAPTIVE] = {"adaptive": config.overlap.chunk.adaptive or True}
    return {name: _with_chunk(config, change) for name, change in chunks.items()}


def _with_chunk(config: TrainConfig, change: Mapping[str, Any]) -> TrainConfig:
    chunk = config.overlap.chunk.model_copy(update=dict(change))
    return config.model_copy(update={"overlap": config.overlap.model_copy(update={"chunk": chunk})})


def compare(configs: Mapping[str, TrainConfig], runs: Runs) -> dict[str, Any]:
    """A row of figures for each size, and what the tuner settled on."""
    rows = [{"chunk": name, **figures(all_lines(turns))} for name, turns in runs.items()]
    best = min(row["step_s"] for row in rows if row["chunk"] != ADAPTIVE)
    for row in rows:
        row["over_best"] = row["step_s"] / best
    return {"results": rows, "adaptive": tuned(configs[ADAPTIVE], runs) if ADAPTIVE in runs else None}


def tuned(config: TrainConfig, runs: Runs) -> dict[str, Any]:
    """What the tuner settled on in each run, and how far its settled steps are from the best fixed size, in percent.

    The fixed sizes count by the same steps (`fixed_step_s`): which sequences make a batch does not depend on the chunk, so
    they did the same work.  `choice_percent` is how far the fixed run of the size settled on is from the best one; None
    where the repeats settled on several sizes, or on one that was not run.
    """
    first = first_settled_step(config.overlap.chunk, longest_chunk(config))
    adaptive = [run for run in runs[ADAPTIVE] if len(run.lines) >= first]
    sizes = [run.lines[first - 1]["chunk_tokens"] for run in adaptive]
    found = {"first_settled_step": first, "settled_on": sizes}
    fixed = {name: _seconds(turns, first) for name, turns in runs.items() if name != ADAPTIVE}
    if not adaptive or not all(fixed.values()):
        return found
    best = min(fixed, key=lambda name: fixed[name] or 0.0)
    best_s, own_s = fixed[best] or 0.0, _seconds(adaptive, first) or 0.0
    choices = {str(size) for size in sizes}
    choice_s = fixed.get(choices.pop()) if len(choices) == 1 else None
    return {
        **found,
        "settled_step_s": own_s,
        "fixed_step_s": fixed,
        "best_fixed": int(best),
        "best_fixed_step_s": best_s,
        "percent": 100 * (own_s / best_s - 1),
        "choice_percent": None if choice_s is None else 100 * (choice_s / best_s - 1),
    }


def _seconds(runs: Sequence[Run], first: int) -> float | None:
    """Mean seconds of the steps from `first` on, median of the runs."""
    means = [_mean(run.lines[first - 1 :]) for run in runs if len(run.lines) >= first]
    return median(means) if means else None


def _mean(lines: Lines) -> float:
    return sum(line["step_s"] for line in lines) / len(lines)


def remarks(result: Mapping[str, Any]) -> list[str]:
    """The lines about the tuner below the table."""
    found = result["adaptive"]
    if found is None:
        return []
    if "percent" not in found:
        return [f"the tuner settles in step {found['first_settled_step']}; the runs ended before: give more --steps"]
    settled = ", ".join(map(str, found["settled_on"]))
    choice = found["choice_percent"]
    by_choice = "" if choice is None else f"; the fixed run of that size: {choice:+.1f} %"
    return [
        f"the tuner settled on {settled}; from step {found['first_settled_step']} on it took "
        f"{found['settled_step_s']:.2f} s/step, {found['percent']:+.1f} % of the best fixed size, {found['best_fixed']} "
        f"({found['best_fixed_step_s']:.2f} s/step){by_choice}"
    ]
