"""Draws docs/images/overlap.svg from docs/images/overlap.json: `python docs/tools/draw_measurements.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[1]
FIGURES, PICTURE = DOCS / "images" / "overlap.json", DOCS / "images" / "overlap.svg"
NAMES = {
    "sequential": "sequential (plain PPO)",
    "intra": "intra-step overlap",
    "inter": "inter-step overlap",
    "full+critic": "both, critic's update hidden too",
}
COLOURS = {"sequential": "#90a4ae", "full+critic": "#4c9f9a"}


def draw(figures: dict[str, Any], path: Path) -> None:
    seconds: dict[str, float] = figures["seconds_a_step"]
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "oppo", "font.size": 11})
    picture, axes = pyplot.subplots(figsize=(8.2, 2.7), layout="constrained")
    modes = list(seconds)
    bars = axes.barh(
        [NAMES[mode] for mode in modes], [seconds[mode] for mode in modes], color=[COLOURS.get(mode, "#b5d9d6") for mode in modes]
    )
    labels = [f"{seconds[mode]:.2f} s  ({figures['x_sequential'][mode]:.2f}x)" for mode in modes]
    axes.bar_label(bars, labels, padding=5)
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds.values()) * 1.32)
    axes.set_xlabel("seconds per step, median")
    axes.set_title(f"{figures['models']};\n{figures['machine']}, {figures['date']}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(picture)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw(json.loads(FIGURES.read_text(encoding="utf-8")), PICTURE)
