"""Figures from the metrics of several runs of one configuration.

Seconds are medians over steady steps, shares are ratios of sums, totals cover all steps. Overlap moves work between steps, so
only totals with the same prompts and forced lengths compare equal work.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from statistics import median
from typing import Any

from oppo_megatron.cores import processor, usable_cores

Lines = Sequence[Mapping[str, Any]]
"""A run's metrics, an entry per step."""

SECONDS = ("step_s", "decode_s", "score_exposed_s", "score_busy_s", "critic_exposed_s", "critic_update_s", "train_s")
PACKAGES = ("torch", "megatron-core", "transformers")


def figures(runs: Sequence[Lines]) -> dict[str, Any]:
    lines = steady(runs)
    return {
        **{name: median_of(lines, name) for name in SECONDS},
        "score_exposed_percent": share(lines, "score_exposed_s", "score_busy_s"),
        "critic_exposed_percent": share(lines, "critic_exposed_s", "critic_update_s"),
        "idle_actor_s": median(line["idle_s"]["actor"] for line in lines),
        "idle_scorer_s": median(line["idle_s"]["scorer"] for line in lines),
        "tokens_per_s": sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines),
        "total_s": median(sum(line["step_s"] for line in run) for run in runs),
        "tokens": [sum(line["tokens"] for line in run) for run in runs],
        "step_s_by_run": [[line["step_s"] for line in run] for run in runs],
    }


def steady(runs: Sequence[Lines]) -> list[Mapping[str, Any]]:
    """Steps after the first of all runs, or a run's only one."""
    return [line for run in runs for line in (run[1:] or run)]


def median_of(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None


def share(lines: Lines, part: str, whole: str) -> float | None:
    """Sum of `part` in percent of `whole`, over lines with both."""
    both = [line for line in lines if line.get(part) is not None and line.get(whole) is not None]
    total = sum(line[whole] for line in both)
    return 100 * sum(line[part] for line in both) / total if total else None


def speedups(row: Mapping[str, Any], base: Mapping[str, Any] | None, name: str) -> dict[str, float | None]:
    """`base`'s time over the row's, by median step and total."""
    return {f"{name}_{seconds}": None if base is None else base[seconds] / row[seconds] for seconds in ("step_s", "total_s")}


def describe_machine() -> dict[str, Any]:
    import torch

    return {
        "processor": processor()[1] or platform.machine(),
        "usable_cores": usable_cores(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
