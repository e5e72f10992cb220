"""Tables and bar charts that compare runs.  matplotlib is loaded on first use and drawn on without its global state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from oppo_megatron.report.colours import COLOURS, RUN_COLOURS, SPAN_COLOURS
from oppo_megatron.report.plots import new_figure
from oppo_megatron.report.run_records import ALL_PARTS, split_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID = "#E6E6E6"
IDLE = "#DDDDDD"
DOT = " \N{MIDDLE DOT} "
UTILIZATION = {
    "decode": SPAN_COLOURS["decode"], "score": SPAN_COLOURS["score"], "update": SPAN_COLOURS["update"], "idle": IDLE,
}  # fmt: skip


def format_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return aligned text; `columns` maps each heading to the key of its values.

    A missing value is a dash.  Numbers have two decimals, none from 100 on; a value that would round to 0.00 keeps one digit.
    """
    cells = [list(columns), *([_cell(row.get(key)) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:.0f}"
        return f"{value:.1g}" if 0 < abs(value) < 0.005 else f"{value:.2f}"
    return str(value)


def draw_steps(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Draw the seconds per step of each run as a bar, stacked by what the actor does (`split_step`)."""
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.34 * len(rows))
    axes = figure.subplots()
    names = [f"{row['placement']}{DOT}{row['mode']}" for row in rows]
    parts = [split_step(row) for row in rows]
    left = [0.0] * len(rows)
    for key, (label, colour) in ALL_PARTS.items():
        widths = [part[key] for part in parts]
        axes.barh(names, widths, left=left, color=COLOURS[colour][0], label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        axes.text(row["step_s"], place, f" {row['step_s']:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds per step (medians)")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(out_png)


def draw_utilization(runs: Mapping[str, Sequence[Mapping[str, float]]], out_png: str | os.PathLike[str]) -> None:
    """Draw for each rank of each run the share of time in which it decodes, scores, updates and is idle."""
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
    axes.set_xlabel("percent of the time after the first step; right: useful work")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out_png)


def draw_decode(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Draw decoded tokens/s: a group of bars per batch size, a bar per peer."""
    batches, peers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("batch", "peer"))
    figure = new_figure(width_in=2.5 + 1.8 * len(batches), height_in=4.2)
    axes = figure.subplots()
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        rates = [next(row["tokens_per_s"] for row in rows if (row["batch"], row["peer"]) == (b, peer)) for b in batches]
        at = [place - 0.4 + (number + 0.5) * width for place in range(len(batches))]
        again, colour = divmod(number, len(RUN_COLOURS))
        axes.bar(at, rates, width, color=RUN_COLOURS[colour], hatch="//" * again, label=peer)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("decoded tokens/s")
    _finish(axes, "y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out_png)


def draw_deferrals(runs: Mapping[str, Mapping[str, int]], out_png: str | os.PathLike[str]) -> None:
    """Draw for each run the shares of trained rollouts by the number of steps they were carried over (the paper's Table 2)."""
    figure = new_figure(width_in=8.0, height_in=1.6 + 0.34 * len(runs))
    axes = figure.subplots()
    times = sorted({int(each) for counts in runs.values() for each in counts})
    left = [0.0] * len(runs)
    for number, each in enumerate(times):
        totals = [max(1, sum(counts.values())) for counts in runs.values()]
        widths = [100 * counts.get(str(each), 0) / total for counts, total in zip(runs.values(), totals, strict=True)]
        again, colour = divmod(number, len(RUN_COLOURS))
        axes.barh(list(runs), widths, left=left, color=RUN_COLOURS[colour], hatch="//" * again, label=str(each))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("percent of the trained rollouts, by the steps they were carried over")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(out_png)


def _finish(axes: Axes, grid: Literal["both", "x", "y"]) -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
