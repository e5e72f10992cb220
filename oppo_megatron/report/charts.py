"""Charts as data: `svg.py` draws them into the page, `png.py` into pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["plain", "faint", "stepped", "dashed", "dotted"]
MAX_POINTS = 2000
MAX_BARS = 120
STROKE = 2.0
SAME = 1e-9


@dataclass(frozen=True)
class Line:
    """Values `ys` at `xs`; None is a gap.  `colour` is a name of `colours.COLOURS`; `notes` are shown beside the values."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    style: Style = "plain"
    notes: Sequence[str] = ()

    def thinned(self) -> Line:
        """Every k-th point, the last one too, where there are more than a page can show."""
        every = math.ceil(len(self.xs) / MAX_POINTS)
        if every <= 1:
            return self
        kept = sorted({*range(0, len(self.xs), every), len(self.xs) - 1})
        notes = [self.notes[i] for i in kept] if self.notes else ()
        return Line(self.name, [self.xs[i] for i in kept], [self.ys[i] for i in kept], self.colour, self.style, notes)

    def stretches(self) -> Iterator[list[tuple[float, float]]]:
        """The points between gaps."""
        stretch: list[tuple[float, float]] = []
        for x, y in zip(self.xs, self.ys, strict=True):
            if y is not None:
                stretch.append((x, y))
            elif stretch:
                yield stretch
                stretch = []
        if stretch:
            yield stretch


@dataclass(frozen=True)
class LineChart:
    """Lines over one x axis.  `name` becomes the file's name and the element's id; labels name quantity and unit.

    `note` says how to read it.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False
    note: str = ""

    def widths(self) -> list[float]:
        """Stroke of each line: wider where later ones lie exactly over it, so that its colour is seen on both sides."""
        points = [(line.style, list(line.xs), list(line.ys)) for line in self.lines]
        over = [sum(later == mine for later in points[place + 1 :]) for place, mine in enumerate(points)]
        return [STROKE + 3.0 * min(count, 4) for count in over]


@dataclass(frozen=True)
class Bars:
    """A value for each category of a chart; None: there is none."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True)
class BarChart:
    """Bars of each category, beside each other or `stacked`; `horizontal` ones have a row a category.

    `ends` are texts at the end of each row of a horizontal chart.
    """

    name: str
    title: str
    category_label: str
    value_label: str
    categories: Sequence[str]
    bars: Sequence[Bars]
    stacked: bool = False
    horizontal: bool = False
    ends: Sequence[str] = ()
    high: float = 0.0  # the axis goes at least so far

    @property
    def tallest(self) -> float:
        """The highest value that the axis has to show."""
        columns = zip(*(bars.values for bars in self.bars), strict=True)
        heights = [[value or 0.0 for value in column] for column in columns]
        return max([self.high, *(sum(column) if self.stacked else max(column) for column in heights)])

    @property
    def lowest(self) -> float:
        """The lowest value, at most 0."""
        return min((value for bars in self.bars for value in bars.values if value is not None), default=0.0)


Chart = LineChart | BarChart


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that lie within `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.7)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def extent(values: Sequence[float], from_zero: bool = False) -> tuple[float, float]:
    """What an axis has to show, with some air above and below; never empty."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= SAME * max(abs(low), abs(high)):  # but for rounding, as of the mean of a constant
        high = low
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    air = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0.0 else low - air), high + air


def short(value: float) -> str:
    """A number for an axis or a table: three figures and no noise; thousands are grouped, of millions a power."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
