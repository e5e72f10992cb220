"""Tables and bar charts that compare runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.report.charts import BarChart, Bars, draw, rows_chart, run_colour
from oppo_megatron.report.machine import utilization_chart
from oppo_megatron.report.run_records import ALL_PARTS, split_step

DOT = " \N{MIDDLE DOT} "
Rows = Sequence[Mapping[str, Any]]


def format_table(columns: Mapping[str, str], rows: Rows) -> str:
    """Aligned text; `columns`: key per heading.  Two decimals, none from 100 on, one digit for small ones; a dash if missing."""
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


def draw_steps(rows: Rows, out_png: str | os.PathLike[str]) -> None:
    """Draw seconds per step by the actor's activity (`split_step`)."""
    bars = [(f"{row['placement']}{DOT}{row['mode']}", split_step(row), f"{row['step_s']:.2f} s") for row in rows]
    draw(rows_chart("steps", "Steps (medians)", "run", "seconds per step", bars, ALL_PARTS)).savefig(out_png)


def draw_utilization(runs: Mapping[str, Rows], out_png: str | os.PathLike[str]) -> None:
    """Draw each rank's shares of decoding, scoring, updates and idle time."""
    ranks = [(f"{name.replace('/', DOT)}{DOT}rank {row['rank']}", row) for name, rows in runs.items() for row in rows]
    draw(utilization_chart("Work of each rank", ranks)).savefig(out_png)


def draw_decode(rows: Rows, out_png: str | os.PathLike[str]) -> None:
    """Draw decoded tokens/s by batch size and peer."""
    batches, peers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("batch", "peer"))
    rates = {(row["peer"], row["batch"]): row["tokens_per_s"] for row in rows}
    bars = [Bars(peer, [rates[peer, batch] for batch in batches], run_colour(i)) for i, peer in enumerate(peers)]
    chart = BarChart("decode", "Decoding", "batch size", "decoded tokens/s", [str(batch) for batch in batches], bars)
    draw(chart).savefig(out_png)
