"""Charts as data, and their matplotlib figures, without its global state, so no display is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, legible with every kind of colour vision.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
OTHER_COLOUR = "#666666"
COLOURS = {
    "prefill": "#56B4E9", "decode": "#0072B2", "score": "#E69F00", "update": "#009E73", "critic": "#7FCDB6",
    "send": "#CC79A7", "experience": "#F0E442", "evaluate": "#D55E00", "idle": "#D5D5D5", "other": OTHER_COLOUR,
}  # fmt: skip
SPAN_COLOURS = {name: COLOURS[name] for name in COLOURS if name not in ("idle", "other", "critic")}
GRID = "#E6E6E6"
DPI = 150
WIDTH_IN = 7.0
MAX_POINTS = 2000
MAX_ROWS = 64

UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")

Style = Literal["plain", "dashed", "dotted", "faint", "stepped"]


@dataclass(frozen=True)
class Line:
    """Values (None: a gap), with standard errors."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    style: Style = "plain"
    errors: Sequence[float | None] = ()


@dataclass(frozen=True)
class LineChart:
    """Lines over one x axis; `name`: of the picture's file."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Bars:
    """A value per category, or None."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True)
class BarChart:
    """Rows with texts at their `ends`, or columns; `high`: least upper end of the value axis."""

    name: str
    title: str
    category_label: str
    value_label: str
    categories: Sequence[str]
    bars: Sequence[Bars]
    stacked: bool = False
    horizontal: bool = False
    ends: Sequence[str] = ()
    high: float = 0.0
    note: str = ""

    @property
    def wide(self) -> bool:
        return self.horizontal


Chart = LineChart | BarChart


def run_colour(number: int) -> str:
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over a tenth of the values."""
    window = max(1, len(values) // 10)
    before, after = window // 2, window - window // 2
    return [fmean(values[max(0, at - before) : at + after]) for at in range(len(values))]


def short(value: float) -> str:
    """Three significant digits, grouped thousands, an exponent from ten million on."""
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def show(text: str) -> str:
    """Replace characters that cannot be shown, or that reverse text, by �."""
    return UNSHOWABLE.sub("\ufffd", text)


def new_figure(width_in: float, height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")


def png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def rows_chart(
    name: str, title: str, category: str, value: str, rows: Sequence[tuple[str, Mapping[str, float], str]],
    parts: Mapping[str, tuple[str, str]],
) -> BarChart:  # fmt: skip
    """Stacked rows: label, values by part, text at the end; `parts`: label and colour."""
    bars = [Bars(label, [values[key] for _, values, _ in rows], colour) for key, (label, colour) in parts.items()]
    labels, ends = [label for label, _, _ in rows], [end for _, _, end in rows]
    return BarChart(name, title, category, value, labels, bars, stacked=True, horizontal=True, ends=ends)


def draw(chart: Chart) -> Figure:
    import matplotlib

    rows = 0.34 * len(chart.categories) if isinstance(chart, BarChart) and chart.horizontal else 0.0
    with matplotlib.rc_context({"text.parse_math": False}):  # a `$` in the name of a run is a dollar sign
        figure = new_figure(WIDTH_IN, 1.5 + rows if rows else 3.9)
        axes = figure.subplots()
        axes.set_title(show(chart.title), loc="left", fontsize=11)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if isinstance(chart, LineChart):
            _draw_lines(axes, chart)
            axes.grid(color=GRID, linewidth=0.8)
        else:
            (_draw_rows if chart.horizontal else _draw_columns)(axes, chart)
            axes.grid(axis="x" if chart.horizontal else "y", color=GRID, linewidth=0.8)
        add_legend(figure, *axes.get_legend_handles_labels())
    return figure


def add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], columns: int = 4) -> None:
    if names:
        width_in = 0.6 + 0.08 * max(map(len, names))
        columns = max(1, min(columns, len(names), int(figure.get_figwidth() / width_in)))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _label(name: str) -> str:
    """Legends leave out names with an initial underscore."""
    return f" {show(name)}" if name.startswith("_") else show(name)


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, line in enumerate(chart.lines):
        every = -(-len(line.xs) // MAX_POINTS) or 1
        xs, ys = list(line.xs[::every]), [float("nan") if y is None else y for y in line.ys[::every]]
        faint = line.style == "faint"
        # A line exactly covered by later ones is wider, so that its colour shows on both sides.
        covers = sum((later.style, later.xs, later.ys) == (line.style, line.xs, line.ys) for later in chart.lines[place + 1 :])
        axes.plot(
            xs, ys, color=line.colour, alpha=0.25 if faint else 1.0, linewidth=1.0 if faint else 2.0 + 3.0 * min(covers, 4),
            linestyle={"dashed": "--", "dotted": ":"}.get(line.style, "-"),
            drawstyle="steps-post" if line.style == "stepped" else "default",
            marker="o" if len(ys) == 1 else "", label=None if faint else _label(line.name),
        )  # fmt: skip
        if any(error is not None for error in line.errors):
            errors = [error or 0.0 for error in line.errors[::every]]
            axes.errorbar(xs, ys, yerr=errors, fmt="none", ecolor=line.colour, elinewidth=1.0, capsize=2.0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if all(isinstance(x, int) for line in chart.lines for x in line.xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def _draw_rows(axes: Axes, chart: BarChart) -> None:
    places = list(range(len(chart.categories)))
    left = [0.0] * len(places)
    for bars in chart.bars:
        widths = [max(0.0, value or 0.0) for value in bars.values]
        axes.barh(places, widths, left=left, color=bars.colour, label=_label(bars.name))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in enumerate(chart.ends):
        axes.text(left[place], place, f" {end}", va="center", fontsize=8)
    axes.set_yticks(places, [show(category) for category in chart.categories])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(chart.value_label)


def _draw_columns(axes: Axes, chart: BarChart) -> None:
    places = list(range(len(chart.categories)))
    count = 1 if chart.stacked else max(1, len(chart.bars))
    width, bottom = 0.82 / count, [0.0] * len(places)
    for number, bars in enumerate(chart.bars):
        heights = [value or 0.0 for value in bars.values]
        shift = 0.0 if chart.stacked else width * (number - (count - 1) / 2)
        at = [place + shift for place in places]
        axes.bar(at, heights, width, bottom=bottom, color=bars.colour, label=_label(bars.name))
        if chart.stacked:
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    every = -(-len(places) // 12) or 1
    axes.set_xticks(places[::every], list(chart.categories[::every]))
    axes.set_ylim(top=max(1.05 * chart.high, axes.get_ylim()[1]))
    axes.set_xlabel(chart.category_label)
    axes.set_ylabel(chart.value_label)
