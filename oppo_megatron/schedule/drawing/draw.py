"""Timelines as pictures: a lane a rank, time from left to right.  matplotlib is loaded on first use, without a display."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.checking.checker import Fault
from oppo_megatron.schedule.checking.timeline import COMPUTE, Timeline
from oppo_megatron.schedule.drawing.render import failing_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, made to be told apart with any kind of colour vision.
COLOURS = {
    "decode": "#0072B2",
    "sample": "#56B4E9",
    "prefill actor": "#999999",
    "prefill reference": "#009E73",
    "prefill critic": "#E69F00",
    "prefill reward": "#CC79A7",
}
SCORE_ALPHA = 0.5
OTHER_COLOUR, FAULT_COLOUR = "#666666", "#D50000"
DPI, LANE_HEIGHT = 150, 0.8
MIN_LABEL_SHARE = 0.012  # of the width: below it a bar has no room for its micro-batch
MAX_FAULT_LABELS = 8


def draw(timeline: Timeline, out_png: str | Path, faults: Sequence[Fault] = (), title: str = "") -> None:
    """Write the rank x time grid of `timeline` as PNG; stuck ranks and the actions of `faults` are outlined and named."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 1.6 + 0.55 * len(timeline.spans)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _bars(axes, timeline)
    _failures(axes, timeline, faults)
    ranks = sorted(timeline.spans)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}\n{timeline.bubble(rank):.0%} idle" for rank in ranks], fontsize=8)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0.0, 1e3 * timeline.makespan_s or 1.0)
    axes.set_xlabel("predicted milliseconds")
    axes.set_title(title, fontsize=10, loc="left")
    legend = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: str(entry[1]))
    handles, labels = [handle for handle, _ in legend], [label for _, label in legend]
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(out_png)


def colour(action: Action) -> str:
    """The colour of what an action belongs to."""
    return COLOURS.get(_kind(action), OTHER_COLOUR)


def _kind(action: Action) -> str:
    """What the legend calls it; a score goes with the prefill of its role."""
    return f"prefill {action.role}" if action.op in (Op.PREFILL, Op.SCORE) else action.op.value


def _bars(axes: Axes, timeline: Timeline) -> None:
    kinds: set[tuple[str, bool]] = set()
    for lane, rank in enumerate(sorted(timeline.spans)):
        bars: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
        colours = {}
        for span in timeline.spans[rank]:
            if span.action.op not in COMPUTE:
                continue
            kind = _kind(span.action), span.action.op is Op.SCORE
            colours[kind] = colour(span.action)
            start_ms, length_ms = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
            bars[kind].append((start_ms, length_ms))
            if length_ms >= MIN_LABEL_SHARE * 1e3 * timeline.makespan_s and span.action.op is not Op.SCORE:
                text = str(span.action.micro_batch)
                axes.text(start_ms + length_ms / 2, lane, text, ha="center", va="center", fontsize=7, color="white")
        for kind, pieces in bars.items():
            name, scored = kind
            label = None if kind in kinds else name.replace("prefill", "score" if scored else "prefill")
            axes.broken_barh(
                pieces,
                (lane - LANE_HEIGHT / 2, LANE_HEIGHT),
                color=colours[kind],
                alpha=SCORE_ALPHA if scored else 1.0,
                edgecolor="white",
                linewidth=0.4,
                label=label,
            )
            kinds.add(kind)


def _failures(axes: Axes, timeline: Timeline, faults: Sequence[Fault]) -> None:
    from matplotlib.patches import Rectangle

    width_ms = max(0.012 * 1e3 * timeline.makespan_s, 0.01)
    named = 0
    for lane, rank in enumerate(sorted(timeline.spans)):
        times = failing_times(timeline, faults, rank)
        for at_s in times:
            left_ms = min(1e3 * at_s, max(0.0, 1e3 * timeline.makespan_s - width_ms))
            corner = left_ms, lane - LANE_HEIGHT / 2
            axes.add_patch(Rectangle(corner, width_ms, LANE_HEIGHT, fill=False, edgecolor=FAULT_COLOUR, linewidth=2.0))
        if times and named < MAX_FAULT_LABELS:
            named += 1
            at_s = times[-1] if rank in timeline.stuck else times[0]
            side = "right" if at_s > timeline.makespan_s / 2 else "left"
            text, corner = _what_fails(timeline, faults, rank), (1e3 * at_s, lane - LANE_HEIGHT / 2)
            axes.annotate(text, corner, color=FAULT_COLOUR, fontsize=7, va="bottom", ha=side)


def _what_fails(timeline: Timeline, faults: Sequence[Fault], rank: int) -> str:
    if rank in timeline.stuck:
        return f"stuck at {timeline.stuck[rank].action}"
    fault = next(fault for fault in faults if fault.rank == rank)
    return fault.kind.value if fault.action is None else f"{fault.kind.value}: {fault.action}"
