"""Pictures of finished runs: reward curves, and each rank's work in one step.

matplotlib is loaded on first use and drawn on without its global state, so no display is needed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from oppo_megatron.errors import DataError
from oppo_megatron.report.colours import OTHER_COLOUR, RUN_COLOURS, SPAN_COLOURS
from oppo_megatron.rundir.step_window import WAITING, StepWindow, step_window
from oppo_megatron.rundir.trace import read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
OTHER_STEP_ALPHA = 0.4


def plot_reward(runs: Mapping[str, Sequence[Mapping[str, Any]]], out_png: str | os.PathLike[str]) -> None:
    """Draw `reward_mean` against steps and against seconds (`time_s`), a line a run.

    `runs` maps a run's name to its metrics lines.  The faint line shows the measured values, the strong one their moving mean
    over a tenth of the steps.  Raises DataError where a run has no reward.
    """
    figure = new_figure(width_in=10.0, height_in=4.2)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for number, (name, lines) in enumerate(runs.items()):
        known = [line for line in lines if line.get("reward_mean") is not None and line.get("time_s") is not None]
        if not known:
            raise DataError(
                f"{name}: none of {len(lines)} metrics lines has a finite reward_mean and a time_s; a reward curve "
                "needs at least one; give the metrics.jsonl of a PPO run"
            )
        rewards = [line["reward_mean"] for line in known]
        smooth = moving_mean(rewards, window=max(1, len(rewards) // 10))
        style = {"color": RUN_COLOURS[number % len(RUN_COLOURS)], "marker": "o" if len(known) == 1 else ""}
        for axes, key in ((by_step, "step"), (by_time, "time_s")):
            at = [line[key] for line in known]
            axes.plot(at, rewards, alpha=0.25, linewidth=1.0, **style)
            axes.plot(at, smooth, linewidth=2.0, label=name, **style)
    by_step.set_xlabel("PPO step")
    by_step.set_ylabel("mean reward")
    by_time.set_xlabel("seconds since the start")
    for axes in (by_step, by_time):
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    handles, names = by_step.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False)
    figure.savefig(out_png)


def plot_timeline(traces: Mapping[str, str | os.PathLike[str]], out_png: str | os.PathLike[str]) -> None:
    """Draw what each rank did in each run's step of median length, a row a (run, rank, role), all on one time axis.

    `traces` maps a run's name to its `trace.json`.  Raises DataError where a trace is unreadable or has no step.
    """
    draw_windows({name: step_window(name, read_trace(path), None) for name, path in traces.items()}, out_png)


def draw_windows(windows: Mapping[str, StepWindow], out_png: str | os.PathLike[str]) -> None:
    """Draw a step of each run, by the run's name, as `plot_timeline` does."""
    rows = [len(window.lanes) for window in windows.values()]
    figure = new_figure(width_in=11.0, height_in=1.3 + sum(0.75 + 0.42 * count for count in rows))
    panels = figure.subplots(
        len(windows), 1, sharex=True, squeeze=False, height_ratios=[count + 0.6 for count in rows]
    )[:, 0]
    for axes, (name, window) in zip(panels, windows.items(), strict=True):
        draw_window(axes, name, window)
    longest_s = max(window.seconds for window in windows.values())
    panels[-1].set_xlim(0.0, longest_s * 1.02)
    panels[-1].set_xlabel("seconds since the step's start")
    _draw_span_legend(figure, list(windows.values()))
    figure.savefig(out_png)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, or as many of them as there are near the ends."""
    before, after = window // 2, window - window // 2
    return [fmean(values[max(0, at - before) : at + after]) for at in range(len(values))]


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure in the house's resolution and layout."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")


def draw_window(axes: Axes, name: str, window: StepWindow) -> None:
    """One panel: a row a lane, bars clipped to the step, a line where the step ends."""
    row_of = {lane: row for row, lane in enumerate(window.lanes)}
    bars: dict[tuple[bool, int, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in window.spans:
        left = max(span.start, window.start) - window.start
        right = min(span.end, window.end) - window.start
        lane = row_of[span.rank, span.role]
        bars[span.name not in WAITING, lane, span.name, span.step == window.step].append((left, right - left))
    # In the order of the keys waiting comes first, so that work which lies within it is drawn over it.
    for (_, row, span_name, of_this_step), extents in sorted(bars.items()):
        axes.broken_barh(
            extents,
            (row - 0.36, 0.72),
            facecolor=SPAN_COLOURS.get(span_name, OTHER_COLOUR),
            alpha=1.0 if of_this_step else OTHER_STEP_ALPHA,
            edgecolor="white",
            linewidth=0.2,
        )
    axes.axvline(window.seconds, color="black", linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_title(f"{name}: step {window.step}, {window.seconds:.3g} s", loc="left", fontsize=11, fontweight="bold")
    axes.set_yticks(range(len(row_of)), [f"rank {rank} \N{MIDDLE DOT} {role}" for rank, role in row_of])
    axes.set_ylim(len(row_of) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_span_legend(figure: Figure, windows: Sequence[StepWindow]) -> None:
    """Below the panels: the kinds of span that are seen, and what the dashed line and the paler bars mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {span.name for window in windows for span in window.spans}
    entries: list[tuple[Any, str]] = [
        (Patch(facecolor=colour), name) for name, colour in SPAN_COLOURS.items() if name in seen and name not in WAITING
    ]
    if seen - SPAN_COLOURS.keys():
        entries.append((Patch(facecolor=OTHER_COLOUR), "other"))
    if seen & set(WAITING):
        entries.append((Patch(facecolor=SPAN_COLOURS[WAITING[0]]), "waiting"))
    if any(span.step != window.step for window in windows for span in window.spans):
        entries.append((Patch(facecolor=SPAN_COLOURS["update"], alpha=OTHER_STEP_ALPHA), "paler: work of another step"))
    entries.append((Line2D([], [], color="black", linewidth=1.2, linestyle=(0, (4, 2))), "end of the step"))
    handles, names = zip(*entries, strict=True)
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
