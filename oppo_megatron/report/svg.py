"""Charts as SVG.  Colours, fonts and the dark are the page's style sheet; every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from oppo_megatron.report.charts import STROKE, BarChart, Bars, Chart, Line, LineChart, extent, short, ticks

WIDTH, HEIGHT = 560, 300
WIDE = 1140  # of a chart whose bars are rows
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 12, 46
ROW, BAR = 26, 16
MAX_LABELS = 12
LONGEST_NAME = 48
CHARACTER = 6.6  # width of one in the page's chart font


def chart_svg(chart: Chart) -> str:
    """The `<svg>` element of a chart."""
    if isinstance(chart, LineChart):
        return _lines_svg(chart)
    return _rows_svg(chart) if chart.horizontal else _columns_svg(chart)


def hover_data(chart: LineChart) -> dict[str, Any]:
    """What the page's script shows where the pointer is: the values, and where the axes lie in the drawing."""
    low_x, high_x, low_y, high_y = _extents(chart)
    lines = [line.thinned() for line in chart.lines if line.style != "faint"]
    return {
        "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "x": [low_x, high_x],
        "y": [low_y, high_y],
        "xLabel": chart.x_label,
        "lines": [
            {
                "name": line.name,
                "colour": line.colour,
                "xs": [_rounded(x) for x in line.xs],
                "ys": [None if y is None else _rounded(y) for y in line.ys],
                "notes": list(line.notes),
            }
            for line in lines
        ],
    }


def _rounded(value: float) -> float:
    """Five figures: more than a pointer can tell apart."""
    return float(f"{value:.5g}")


def _extents(chart: LineChart) -> tuple[float, float, float, float]:
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.ys if y is not None]
    low_x, high_x = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if low_x == high_x:
        low_x, high_x = max(low_x - 0.5, min(low_x, 0.0)), high_x + 0.5  # no time before the start
    return low_x, high_x, *extent(ys, chart.from_zero)


def _lines_svg(chart: LineChart) -> str:
    low_x, high_x, low_y, high_y = _extents(chart)

    def at_x(x: float) -> float:
        return LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    at = ticks(low_x, high_x, 6)
    if all(isinstance(x, int) for line in chart.lines for x in line.xs):
        at = [x for x in at if abs(x - round(x)) < 1e-9]  # there is no half a step
    marks = [_y_axis(ticks(low_y, high_y), at_y), _x_axis(at, at_x)]
    marks += [_line(line.thinned(), width, at_x, at_y) for line, width in zip(chart.lines, chart.widths(), strict=True)]
    return _frame(chart, HEIGHT, [*marks, _axis_names(chart.x_label, chart.y_label)])


def _line(line: Line, width: float, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    parts = []
    for stretch in line.stretches():
        points = [(round(at_x(x), 1), round(at_y(y), 1)) for x, y in stretch]
        if len(points) == 1 and line.style != "faint":
            parts.append(f'<circle class="dot" cx="{points[0][0]}" cy="{points[0][1]}" r="3.5"/>')
        (x, y), rest = points[0], points[1:]
        between = "".join(f"H{x}V{y}" if line.style == "stepped" else f"L{x} {y}" for x, y in rest)
        parts.append(f'<path d="M{x} {y}{between}"/>')
    colour = f"--colour:var(--c-{line.colour})" + (f";--width:{width:g}" if width > STROKE else "")
    return f'<g class="line {line.style}" style="{colour}" data-name="{escape(line.name)}">{"".join(parts)}</g>'


def _columns_svg(chart: BarChart) -> str:
    low, high = extent([chart.lowest, chart.tallest], from_zero=True)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(chart.categories))

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    marks = [_y_axis(ticks(low, high), at_y)]
    count = 1 if chart.stacked else max(1, len(chart.bars))
    width = min(slot * 0.82 / count, 46.0)
    for place, category in enumerate(chart.categories):
        middle, bottom = LEFT + slot * (place + 0.5), 0.0
        for number, bars in enumerate(chart.bars):
            value = bars.values[place]
            if value is None:
                continue
            start = bottom if chart.stacked else 0.0
            bottom += value
            x = middle - width * count / 2 + (0 if chart.stacked else width * number)
            upper, lower = at_y(max(start, start + value)), at_y(min(start, start + value))
            marks.append(_rect(bars, category, value, (x, upper, width * 0.94, lower - upper)))
    marks += _category_labels(chart.categories, slot)
    return _frame(chart, HEIGHT, [*marks, _axis_names(chart.category_label, chart.value_label)])


def _category_labels(categories: Sequence[str], slot: float) -> list[str]:
    """As many of them as have room."""
    widest = max((len(category) for category in categories), default=1) * CHARACTER + 8
    every = max(1, -(-len(categories) // MAX_LABELS), int(-(-widest // slot)))
    return [
        _text(LEFT + slot * (place + 0.5), HEIGHT - BOTTOM + 16, category, "middle")
        for place, category in enumerate(categories)
        if place % every == 0
    ]


def _rows_svg(chart: BarChart) -> str:
    """A row a category, the bars of a row stacked."""
    names = [_cut(category) for category in chart.categories]
    left = 16 + CHARACTER * max((len(name) for name in names), default=1)
    right = 14 + CHARACTER * max((len(end) for end in chart.ends), default=0)
    height = TOP + ROW * len(chart.categories) + BOTTOM
    high = chart.tallest or 1.0

    def at_x(x: float) -> float:
        return left + x / high * (WIDE - left - right)

    marks = [_x_axis(ticks(0.0, high), at_x, height)]
    for place, category in enumerate(chart.categories):
        top, start = TOP + ROW * place + (ROW - BAR) / 2, 0.0
        marks.append(_text(left - 8, top + BAR - 4, names[place], "end"))
        for bars in chart.bars:
            value = max(0.0, bars.values[place] or 0.0)
            marks.append(_rect(bars, category, value, (at_x(start), top, at_x(start + value) - at_x(start), BAR)))
            start += value
        if chart.ends:
            marks.append(_text(at_x(start) + 6, top + BAR - 4, chart.ends[place], "start"))
    label = _text((left + WIDE - right) / 2, height - 8, chart.value_label, "middle", "axis")
    return _frame(chart, height, [*marks, label], WIDE)


def _cut(name: str) -> str:
    """A long name without its middle: runs differ in their ends, ranks stand at the end."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2 - 1]}…{name[-LONGEST_NAME // 2 :]}"


def _rect(bars: Bars, category: str, value: float, box: tuple[float, float, float, float]) -> str:
    x, y, width, height = (round(number, 1) for number in box)
    title = escape(f"{category}: {bars.name} {short(value)}")
    return (
        f'<rect style="fill:var(--c-{bars.colour})" x="{x}" y="{y}" width="{width}" height="{height}">'
        f"<title>{title}</title></rect>"
    )


def _y_axis(at: Sequence[float], place: Callable[[float], float]) -> str:
    lines = "".join(f'<path class="grid" d="M{LEFT} {place(y):.1f}H{WIDTH - RIGHT}"/>' for y in at)
    return lines + "".join(_text(LEFT - 7, place(y) + 4, short(_clean(y, at)), "end") for y in at)


def _x_axis(at: Sequence[float], place: Callable[[float], float], height: int = HEIGHT) -> str:
    lines = "".join(f'<path class="grid" d="M{place(x):.1f} {TOP}V{height - BOTTOM}"/>' for x in at)
    return lines + "".join(_text(place(x), height - BOTTOM + 16, short(_clean(x, at)), "middle") for x in at)


def _clean(value: float, at: Sequence[float]) -> float:
    """A multiple of the ticks' distance without the noise of floats."""
    return round(value / (at[1] - at[0])) * (at[1] - at[0]) if len(at) > 1 else value


def _axis_names(x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle", "axis") + (
        f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _frame(chart: Chart, height: int, marks: Sequence[str], width: int = WIDTH) -> str:
    return (
        f'<svg class="chart" id="chart-{escape(chart.name)}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(marks)}</svg>'
    )
