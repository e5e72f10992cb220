"""Pictures of the benchmarks.  matplotlib is loaded on first use and drawn on without its global state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oppo_megatron.train.plots import SPAN_COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID = "#E6E6E6"
IDLE = "#DDDDDD"
DOT = " \N{MIDDLE DOT} "
STEP_PARTS = {
    "decode_s": ("decode", SPAN_COLOURS["decode"]),
    "score_exposed_s": ("exposed scoring", SPAN_COLOURS["score"]),
    "train_s": ("actor's update", SPAN_COLOURS["update"]),
    "critic_exposed_s": ("exposed critic update", "#CC79A7"),
}
UTILIZATION = {
    "decode": SPAN_COLOURS["decode"], "score": SPAN_COLOURS["score"], "update": SPAN_COLOURS["update"], "idle": IDLE,
}  # fmt: skip


def draw_steps(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A bar a run: seconds of a step, stacked by what the actor does with them; `rows` as `overlap.compare` makes them."""
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.34 * len(rows))
    axes = figure.subplots()
    names = [f"{row['placement']}{DOT}{row['mode']}" for row in rows]
    left = [0.0] * len(rows)
    for key, (label, colour) in STEP_PARTS.items():
        widths = [row.get(key) or 0.0 for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    rest = [max(0.0, row["step_s"] - start) for row, start in zip(rows, left, strict=True)]
    axes.barh(names, rest, left=left, color=IDLE, label="other")
    for place, row in enumerate(rows):
        axes.text(row["step_s"], place, f" {row['step_s']:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a step (medians)")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(out_png)


def draw_utilization(runs: Mapping[str, Sequence[Mapping[str, float]]], out_png: str | os.PathLike[str]) -> None:
    """A bar a rank of each run: the share of the time that it decodes, scores, updates and is idle."""
    bars = [(name, row) for name, rows in runs.items() for row in rows]
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.3 * len(bars))
    axes = figure.subplots()
    names = [f"{name.replace('/', DOT)}{DOT}rank {row['rank']}" for name, row in bars]
    left = [0.0] * len(bars)
    for kind, colour in UTILIZATION.items():
        widths = [max(0.0, row[kind]) for _, row in bars]
        axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (_, row) in enumerate(bars):
        axes.text(101, place, f"{100 - row['idle']:.0f} %", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("percent of the time after the first step; at the right: useful work")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out_png)


def draw_weave(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A bar a mode: seconds of the rounds of a step, with the share in which the ranks stand idle."""
    figure = new_figure(width_in=7.0, height_in=1.4 + 0.4 * len(rows))
    axes = figure.subplots()
    names = [row["mode"] for row in rows]
    idle = [row["rounds_s"] * row["bubble_percent"] / 100 for row in rows]
    busy = [row["rounds_s"] - seconds for row, seconds in zip(rows, idle, strict=True)]
    axes.barh(names, busy, color=SPAN_COLOURS["decode"], label="work")
    axes.barh(names, idle, left=busy, color=IDLE, label="bubble")
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the rounds of a step, mean of the ranks")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out_png)


def _finish(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
