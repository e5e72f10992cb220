"""Tables of figures as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text: `columns` maps each heading to the key of its values.  What a row has not, or is None, is a dash.

    Two decimals, none from 100 on; what these would make 0.00 and is not has its first digit.
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
