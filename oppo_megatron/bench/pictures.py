"""Pictures of the benchmarks.  matplotlib is loaded on first use and drawn on without its global state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from oppo_megatron.report.charts import RUN_COLOURS, SPAN_COLOURS, moving_mean, new_figure
from oppo_megatron.report.run_records import ALL_PARTS, split_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from oppo_megatron.bench.suite import Lines

GRID = "#E6E6E6"
IDLE = "#DDDDDD"
DOT = " \N{MIDDLE DOT} "
UTILIZATION = {
    "decode": SPAN_COLOURS["decode"], "score": SPAN_COLOURS["score"], "update": SPAN_COLOURS["update"], "idle": IDLE,
}  # fmt: skip


def draw_steps(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A bar a run: seconds of a step, stacked by what the actor does with them; `rows` as `overlap.compare` makes them.

    The parts come from `split_step`.
    """
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.34 * len(rows))
    axes = figure.subplots()
    names = [f"{row['placement']}{DOT}{row['mode']}" for row in rows]
    parts = [split_step(row) for row in rows]
    left = [0.0] * len(rows)
    for key, (label, colour) in ALL_PARTS.items():
        widths = [part[key] for part in parts]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        axes.text(row["step_s"], place, f" {row['step_s']:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a step (medians)")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(out_png)


def draw_utilization(runs: Mapping[str, Sequence[Mapping[str, float]]], out_png: str | os.PathLike[str]) -> None:
    """A bar a rank of each run: the share of the time that it decodes, scores, updates and is idle."""
    bars = [(name, row) for name, rows in runs.items() for row in rows]
    figure = new_figure(width_in=9.0, height_in=1.5 + 0.3 * len(bars))
    axes = figure.subplots()
    names = [f"{name.replace('/', DOT)}{DOT}rank {row['rank']}" for name, row in bars]
    left = [0.0] * len(bars)
    for kind, colour in UTILIZATION.items():
        widths = [max(0.0, row[kind]) for _, row in bars]
        axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, (_, row) in enumerate(bars):
        axes.text(101, place, f"{100 - row['idle']:.0f} %", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("percent of the time after the first step; at the right: useful work")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out_png)


def draw_decode(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A group of bars a batch size, a bar a peer: tokens/s; with a limit, a mark at the most that the machine allows."""
    batches, peers = (list(dict.fromkeys(row[key] for row in rows)) for key in ("batch", "peer"))
    figure = new_figure(width_in=2.5 + 1.8 * len(batches), height_in=4.2)
    axes = figure.subplots()
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        rates = [next(row["tokens_per_s"] for row in rows if (row["batch"], row["peer"]) == (b, peer)) for b in batches]
        at = [place - 0.4 + (number + 0.5) * width for place in range(len(batches))]
        again, colour = divmod(number, len(RUN_COLOURS))
        axes.bar(at, rates, width, color=RUN_COLOURS[colour], hatch="//" * again, label=peer)
    most = {row["batch"]: row["most_tokens_per_s"] for row in rows if "most_tokens_per_s" in row}
    for place, batch in enumerate(most):
        label = "_more" if place else "most by peaks"  # matplotlib leaves out names with _
        axes.hlines(most[batch], place - 0.4, place + 0.4, color="black", linestyle="--", label=label)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("batch size")
    axes.set_ylabel("decoded tokens/s")
    _finish(axes, "y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out_png)


def draw_weave(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A bar a mode: seconds of the rounds of a step, with the share in which the ranks stand idle."""
    figure = new_figure(width_in=7.0, height_in=1.4 + 0.4 * len(rows))
    axes = figure.subplots()
    names = [row["mode"] for row in rows]
    idle = [row["rounds_s"] * row["bubble_percent"] / 100 for row in rows]
    busy = [row["rounds_s"] - seconds for row, seconds in zip(rows, idle, strict=True)]
    axes.barh(names, busy, color=SPAN_COLOURS["decode"], label="work")
    axes.barh(names, idle, left=busy, color=IDLE, label="bubble")
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the rounds of a step, mean of the ranks")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out_png)


def draw_forks(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Seconds a step against the tokens of the prompts, with forks and without, and from the fastest to the slowest step."""
    figure = new_figure(width_in=6.5, height_in=4.0)
    axes = figure.subplots()
    for number, (fork, label) in enumerate({"no": "each response's own prefill", "yes": "forked"}.items()):
        own = sorted((row for row in rows if row["fork"] == fork), key=lambda row: row["prompt_tokens"])
        seconds = [row["step_s"] for row in own]
        ends = [[row["step_s"] - row["min_step_s"] for row in own], [row["max_step_s"] - row["step_s"] for row in own]]
        colour = RUN_COLOURS[number]
        axes.errorbar(
            [row["prompt_tokens"] for row in own], seconds, ends, marker="o", color=colour, label=label, capsize=3
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a prompt")
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    _finish(axes, "both")
    figure.savefig(out_png)


def draw_chunks(result: Mapping[str, Any], out_png: str | os.PathLike[str]) -> None:
    """Seconds a step against the chunk size, `result` as `chunk.compare` makes it.

    The tuner's settled steps are a line, with the fixed sizes over the same steps beside it: those do not hold all of the
    fixed runs' work, so that the line and the points of whole runs do not compare.
    """
    fixed = sorted((int(row["chunk"]), row["step_s"]) for row in result["results"] if row["chunk"].isdigit())
    figure = new_figure(width_in=6.5, height_in=4.0)
    axes = figure.subplots()
    axes.plot(*zip(*fixed, strict=True), marker="o", color=RUN_COLOURS[0], label="fixed")
    tuned = result["adaptive"] or {}
    if "settled_step_s" in tuned:
        label = f"adaptive, settled on {', '.join(map(str, tuned['settled_on']))}"
        axes.axhline(tuned["settled_step_s"], color=RUN_COLOURS[1], linestyle="--", label=label)
        same = sorted((int(size), seconds) for size, seconds in tuned["fixed_step_s"].items())
        axes.plot(
            *zip(*same, strict=True), marker="o", linestyle=":", color=RUN_COLOURS[1], label="fixed, the same steps"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([size for size, _ in fixed], [str(size) for size, _ in fixed])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chunk size, decode steps")
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    _finish(axes, "both")
    figure.savefig(out_png)


def draw_deltas(runs: Mapping[str, Lines], out_png: str | os.PathLike[str]) -> None:
    """Mean reward against seconds of training, and delta against steps, a line a run."""
    figure = new_figure(width_in=10.0, height_in=4.2)
    reward, delta = figure.subplots(1, 2)
    for number, (name, lines) in enumerate(runs.items()):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        seconds = list(accumulate(line["step_s"] for line in lines))
        smooth = moving_mean([line["reward_mean"] for line in lines], window=max(1, len(lines) // 10))
        reward.plot(seconds, smooth, color=colour, label=f"{name} ({seconds[-1]:.0f} s)", marker=".")
        delta.step([line["step"] for line in lines], [line["delta"] for line in lines], where="mid", color=colour)
    reward.set_xlabel("seconds of training")
    reward.set_ylabel("mean reward")
    delta.set_xlabel("PPO step")
    delta.set_ylabel("delta")
    for axes in (reward, delta):
        _finish(axes, "both")
    figure.legend(*reward.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out_png)


def draw_ablation(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Speed-ups of each overlap alone and of both, simulated beside published; `rows` of `studies.paper.Paper.ablation`."""
    figure = new_figure(width_in=7.0, height_in=3.8)
    axes = figure.subplots()
    names = [f"{row['setup']}{DOT}{row['mode']}" for row in rows]
    for number, (key, label) in enumerate({"speedup": "simulated", "printed": "published"}.items()):
        at = [place - 0.2 + 0.4 * number for place in range(len(rows))]
        axes.bar(at, [row[key] for row in rows], 0.4, color=RUN_COLOURS[number], label=label)
    axes.set_xticks(range(len(rows)), names)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speed-up over no overlap")
    axes.legend(frameon=False)
    _finish(axes, "y")
    figure.savefig(out_png)


def draw_delta_costs(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Seconds a step, and mean deferrals, against delta; `rows` of `studies.paper.Paper.inter`."""
    figure = new_figure(width_in=8.0, height_in=3.6)
    deltas = [row["delta"] for row in rows]
    labels = {"step_s": "seconds a step", "deferrals": "mean deferrals of a trained response"}
    for axes, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        axes.plot(deltas, [row[key] for row in rows], marker="o", color=RUN_COLOURS[0])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("delta, prompts")
        axes.set_ylabel(label)
        _finish(axes, "both")
    figure.savefig(out_png)


def draw_scaling(labels: Mapping[str, str], rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """A panel an axis (`labels`), both scales logarithmic: seconds a step in both modes."""
    figure = new_figure(width_in=1.0 + 3.6 * len(labels), height_in=3.8)
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        places = [row for row in rows if row["axis"] == name]
        key, text = ("million_parameters", "million parameters a role") if name == "model" else ("value", label)
        for number, mode in enumerate(("sequential", "full")):
            seconds = [row[f"{mode}_step_s"] for row in places]
            axes.plot([row[key] for row in places], seconds, marker="o", color=RUN_COLOURS[number], label=mode)
        axes.set_xscale("log")
        axes.set_yscale("log")
        at = [row[key] for row in places]
        axes.set_xticks(at, [f"{value:.3g}" for value in at])
        axes.minorticks_off()
        axes.set_xlabel(text)
        _finish(axes, "both")
    panels[0].set_ylabel("seconds a step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out_png)


def draw_overhead(dry: Mapping[str, Any], out_png: str | os.PathLike[str]) -> None:
    """Milliseconds of each step of a dry run, stacked by part; `dry` as `overhead.dry_figures` makes it."""
    figure = new_figure(width_in=7.0, height_in=3.8)
    axes = figure.subplots()
    steps = dry["steps"]
    bottom = [0.0] * len(steps)
    for number, part in enumerate(dry["parts_ms"]):
        heights = [1e3 * step[part] for step in steps]
        axes.bar(range(1, len(steps) + 1), heights, bottom=bottom, color=RUN_COLOURS[number], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("step")
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False)
    _finish(axes, "y")
    figure.savefig(out_png)


def draw_deferrals(runs: Mapping[str, Mapping[str, int]], out_png: str | os.PathLike[str]) -> None:
    """A bar a run: shares of the trained rollouts by how many steps they were carried over (the paper's Table 2)."""
    figure = new_figure(width_in=8.0, height_in=1.6 + 0.34 * len(runs))
    axes = figure.subplots()
    times = sorted({int(each) for counts in runs.values() for each in counts})
    left = [0.0] * len(runs)
    for number, each in enumerate(times):
        totals = [max(1, sum(counts.values())) for counts in runs.values()]
        widths = [100 * counts.get(str(each), 0) / total for counts, total in zip(runs.values(), totals, strict=True)]
        again, colour = divmod(number, len(RUN_COLOURS))
        axes.barh(list(runs), widths, left=left, color=RUN_COLOURS[colour], hatch="//" * again, label=str(each))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("percent of the trained rollouts, by the steps that they were carried over")
    _finish(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(out_png)


def draw_seeds(rows: Sequence[Mapping[str, Any]], out_png: str | os.PathLike[str]) -> None:
    """Reward and held-out accuracy of both kinds of run, a line a seed from sequential to OPPO; `rows` of `seeds.compare`."""
    figure = new_figure(width_in=7.0, height_in=3.2)
    panels = figure.subplots(1, 2)
    for axes, key, label in zip(
        panels, ("reward_half", "accuracy_after"), ("reward, second half", "accuracy"), strict=True
    ):
        for row in rows:
            values = [row[f"sequential.{key}"], row[f"oppo.{key}"]]
            axes.plot(["sequential", "OPPO"], values, marker="o", label=f"seed {row['seed']}")
        axes.set_ylabel(label)
        axes.margins(x=0.2)
        _finish(axes, "y")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(out_png)


def _finish(axes: Axes, grid: Literal["both", "x", "y"]) -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
