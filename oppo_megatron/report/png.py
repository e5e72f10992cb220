"""Charts as PNG, through matplotlib, which is loaded on first use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from oppo_megatron.report.charts import BarChart, Chart, LineChart
from oppo_megatron.report.colours import COLOURS
from oppo_megatron.report.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID = "#E6E6E6"
WIDTH_IN = 7.0
KEY_IN, CHARACTER_IN = 0.6, 0.08  # of a legend's entry


def draw(chart: Chart, out_png: str | os.PathLike[str]) -> None:
    """Write the chart as a picture."""
    rows = 0.34 * len(chart.categories) if isinstance(chart, BarChart) and chart.horizontal else 0.0
    figure = new_figure(width_in=WIDTH_IN, height_in=1.5 + rows if rows else 3.9)
    axes = figure.subplots()
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    elif chart.horizontal:
        _draw_rows(axes, chart)
    else:
        _draw_columns(axes, chart)
    axes.set_title(chart.title, loc="left", fontsize=11)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=legend_columns(names), frameon=False)
    figure.savefig(out_png)


def legend_columns(names: Sequence[str]) -> int:
    """Columns of a legend: as many as the picture is wide enough for, at most 4; matplotlib fills one column after the other."""
    for columns in range(min(4, len(names)), 1, -1):
        rows, higher = divmod(len(names), columns)  # the first `higher` columns have a row more
        starts = [place * rows + min(place, higher) for place in range(columns + 1)]
        longest = [max(map(len, names[start:end])) for start, end in pairwise(starts)]
        if sum(KEY_IN + CHARACTER_IN * length for length in longest) <= WIDTH_IN:
            return columns
    return 1


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    for line, width in zip(chart.lines, chart.widths(), strict=True):
        faint = line.style == "faint"
        ys = [float("nan") if y is None else y for y in line.ys]
        axes.plot(
            list(line.xs),
            ys,
            color=COLOURS[line.colour][0],
            alpha=0.25 if faint else 1.0,
            linewidth=1.0 if faint else width,
            linestyle={"dashed": "--", "dotted": ":"}.get(line.style, "-"),
            drawstyle="steps-post" if line.style == "stepped" else "default",
            marker="o" if len(ys) == 1 else "",
            label=None if faint else _plain(line.name),
        )
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(color=GRID, linewidth=0.8)


def _draw_rows(axes: Axes, chart: BarChart) -> None:
    places = list(range(len(chart.categories)))
    left = [0.0] * len(places)
    for bars in chart.bars:
        widths = [max(0.0, value or 0.0) for value in bars.values]
        axes.barh(places, widths, left=left, color=COLOURS[bars.colour][0], label=_plain(bars.name))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in enumerate(chart.ends):
        axes.text(left[place], place, f" {_plain(end)}", va="center", fontsize=8)
    axes.set_yticks(places, [_plain(category) for category in chart.categories])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(chart.value_label)
    axes.grid(axis="x", color=GRID, linewidth=0.8)


def _draw_columns(axes: Axes, chart: BarChart) -> None:
    places = list(range(len(chart.categories)))
    width = 0.82 if chart.stacked else 0.82 / max(1, len(chart.bars))
    bottom = [0.0] * len(places)
    for number, bars in enumerate(chart.bars):
        heights = [value or 0.0 for value in bars.values]
        shift = 0.0 if chart.stacked else width * (number - (len(chart.bars) - 1) / 2)
        axes.bar(
            [place + shift for place in places],
            heights,
            width,
            bottom=bottom if chart.stacked else None,
            color=COLOURS[bars.colour][0],
            label=_plain(bars.name),
        )
        if chart.stacked:
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    every = max(1, -(-len(places) // 12))
    axes.set_xticks(places[::every], [_plain(category) for category in chart.categories[::every]])
    axes.set_xlabel(chart.category_label)
    axes.set_ylabel(chart.value_label)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: no formula, and no name that begins as those that a legend leaves out."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
