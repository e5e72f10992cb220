"""Pictures of `plan.json`: the phases of a step on the ranks, and time against memory.  matplotlib is loaded on first use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from oppo_megatron.report.colours import COLOURS, run_colour
from oppo_megatron.report.plots import new_figure

GRID = "#E6E6E6"


def draw_plan(record: Mapping[str, Any], out_png: str | os.PathLike[str]) -> None:
    """A lane a role of the first plan: when its ranks work for it, one phase behind the other as they would without overlap."""
    plan = record["plans"][0]
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.5 * len(plan["roles"]))
    axes = figure.subplots()
    names = []
    for row, (role, own) in enumerate(plan["roles"].items()):
        names.append(f"{role}, ranks {own['ranks']}")
        for start, seconds, kind in _phases(plan, role):
            axes.barh(row, seconds, left=start, color=COLOURS[kind][0], height=0.7)
    for kind in ("decode", "score", "update", "send"):
        axes.barh(0, 0, color=COLOURS[kind][0], label={"send": "weights"}.get(kind, kind))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, predicted")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out_png)


def _phases(plan: Mapping[str, Any], role: str) -> list[tuple[float, float, str]]:
    """(start, seconds, kind)."""
    return [(span["start_s"], span["seconds"], span["kind"]) for span in plan["spans"] if span["role"] == role]


def draw_pareto(record: Mapping[str, Any], out_png: str | os.PathLike[str]) -> None:
    """A point a plan: seconds of a step against the fullest rank; the line joins those that no other beats in both."""
    figure = new_figure(width_in=6.5, height_in=4.0)
    axes = figure.subplots()
    points = [(plan["fullest_gb"], plan["step_s"]) for plan in record["plans"]]
    axes.scatter(*zip(*points, strict=True), color=COLOURS[run_colour(0)][0])
    front, least = [], float("inf")
    for gb, seconds in sorted(points):
        if seconds < least:
            front.append((gb, seconds))
            least = seconds
    axes.step(
        *zip(*front, strict=True), where="post", color=COLOURS[run_colour(1)][0], label="no other beats these in both"
    )
    cluster = record["cluster"]
    axes.axvline(
        cluster["memory_gb"] * (1 - cluster["margin"]), color="black", linestyle="--", label="memory less the margin"
    )
    axes.set_xlabel("fullest rank, GB")
    axes.set_ylabel("seconds a step, predicted")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out_png)
