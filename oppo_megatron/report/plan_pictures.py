"""Pictures of `plan.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from oppo_megatron.report.charts import COLOURS, GRID, RUN_COLOURS, add_legend, new_figure

PathLike = str | os.PathLike[str]


def draw_plan(record: Mapping[str, Any], out_png: PathLike) -> None:
    """Draw the first plan, one row per role: the phases of a step one after another, as without overlap."""
    plan = record["plans"][0]
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.5 * len(plan["roles"]))
    axes = figure.subplots()
    for row, role in enumerate(plan["roles"]):
        for span in plan["spans"]:
            if span["role"] == role:
                axes.barh(row, span["seconds"], left=span["start_s"], color=COLOURS[span["kind"]], height=0.7)
    for kind, label in (("decode", "decode"), ("score", "score"), ("update", "update"), ("send", "weights")):
        axes.barh(0, 0, color=COLOURS[kind], label=label)
    names = [f"{role}, ranks {own['ranks']}" for role, own in plan["roles"].items()]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("predicted seconds of a step")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    add_legend(figure, *axes.get_legend_handles_labels())
    figure.savefig(out_png)


def draw_pareto(record: Mapping[str, Any], out_png: PathLike) -> None:
    """Draw a point per plan, step time against the memory of the fullest rank, and the line of undominated plans."""
    figure = new_figure(width_in=6.5, height_in=4.0)
    axes = figure.subplots()
    points = sorted((plan["fullest_gb"], plan["step_s"]) for plan in record["plans"])
    axes.scatter(*zip(*points, strict=True), color=RUN_COLOURS[0])
    front = [(gb, s) for place, (gb, s) in enumerate(points) if all(s < faster for _, faster in points[:place])]
    axes.step(*zip(*front, strict=True), where="post", color=RUN_COLOURS[1], label="no plan beats these in both")
    cluster = record["cluster"]
    usable_gb = cluster["memory_gb"] * (1 - cluster["margin"])
    axes.axvline(usable_gb, color="black", linestyle="--", label="memory less the margin")
    axes.set(xlabel="fullest rank, GB", ylabel="predicted seconds per step")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    add_legend(figure, *axes.get_legend_handles_labels(), columns=2)
    figure.savefig(out_png)
