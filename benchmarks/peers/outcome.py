"""Results of TRL's runs and ours: differences in the work, the table, the picture.

Lines are the steps of a run: from `metrics.jsonl` for ours, from RESULT.json for TRL (`trl_training.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from oppo_megatron.bench.figures import Lines, steady
from oppo_megatron.report.charts import SPAN_COLOURS, new_figure

TRL = "TRL"
REWARD_TOLERANCE = 1e-5  # of means in float32
COLUMNS = {
    "run": "run", "ranks x threads": "layout", "s/step": "step_s", "min": "min_step_s", "max": "max_step_s",
    "first": "first_step_s", "generate": "generate_s", "score": "score_s", "train": "train_s", "rest": "rest_s",
    "tokens/s": "tokens_per_s", "x TRL (step)": "times_trl_step", "x TRL (run)": "times_trl_run",
}  # fmt: skip
PARTS = {
    "generate_s": ("generate", SPAN_COLOURS["decode"]),
    "score_s": ("score", SPAN_COLOURS["score"]),
    "train_s": ("train", SPAN_COLOURS["update"]),
    "rest_s": ("rest", "#DDDDDD"),
}


@dataclass(frozen=True)
class Ours:
    """How one of our configurations runs.

    carries: rollouts are carried from a step to the next, so that only a whole run compares.
    streams_here: a rank decodes and scores in the same rounds, so that their seconds cannot be separated.
    shares_ranks: a rank updates actor and critic, if there is one, one after the other.
    """

    layout: str
    carries: bool
    streams_here: bool
    shares_ranks: bool


def unequal_work(work: Mapping[str, Any], trl: Sequence[Lines], ours: Mapping[str, tuple[Ours, Sequence[Lines]]]) -> list[str]:
    """Return every difference between the planned work and the work of a run; none if they are equal."""
    problems = [f"{TRL}, run {turn}: {found}" for turn, lines in enumerate(trl, 1) for found in _trl_faults(work, lines)]
    for name, (how, runs) in ours.items():
        for turn, lines in enumerate(runs, 1):
            problems += [f"{name}, run {turn}: {found}" for found in _our_faults(work, how, lines)]
    return problems


def _trl_faults(work: Mapping[str, Any], lines: Lines) -> Iterator[str]:
    """Prompt and response tokens of every row of every step."""
    if len(lines) != work["steps"]:
        yield f"{len(lines)} steps, not {work['steps']}"
    lengths = {"prompt_tokens": [len(prompt) for prompt in work["prompts"]], "response_tokens": work["lengths"]}
    for number, line in enumerate(lines):
        rows = slice(number * work["batch_size"], (number + 1) * work["batch_size"])
        for name, wanted in lengths.items():
            if line[name] != wanted[rows]:
                yield f"step {number + 1} has {name} {line[name]}, not {wanted[rows]}"
    yield from _reward_faults(work, lines, by_step=True)


def _our_faults(work: Mapping[str, Any], how: Ours, lines: Lines) -> Iterator[str]:
    """Check response tokens decoded and trained: per step, or of the run if rollouts are carried over."""
    batch, lengths = work["batch_size"], work["lengths"]
    if len(lines) != work["steps"]:
        yield f"{len(lines)} steps, not {work['steps']}"
    decoded = [line["tokens"] for line in lines]
    trained = [round(line["trained_len_mean"] * batch) for line in lines]
    wanted = [sum(lengths[first : first + batch]) for first in range(0, len(lengths), batch)]
    for name, found in (("decoded", decoded), ("trained", trained)):
        if sum(found) != sum(wanted):
            yield f"{sum(found)} response tokens {name}, not {sum(wanted)}"
        elif not how.carries and found != wanted:
            yield f"response tokens {name} by step are {found}, not {wanted}"
    yield from _reward_faults(work, lines, by_step=not how.carries)


def _reward_faults(work: Mapping[str, Any], lines: Lines, by_step: bool) -> Iterator[str]:
    """Check mean rewards, per step or of the run, if they are a function of the lengths."""
    if "length_penalty" not in work:
        return
    longest, buffer = work["length_penalty"]["max_completion_len"], work["length_penalty"]["soft_punish_cache"]
    rewards = [-min(max(length - longest + buffer, 0) / buffer, 1.0) for length in work["lengths"]]
    batch = work["batch_size"]
    wanted = [fmean(rewards[first : first + batch]) for first in range(0, len(rewards), batch)]
    found = [line["reward_mean"] for line in lines]
    if not by_step:
        wanted, found = [fmean(wanted)], [fmean(found)]
    if not all(math.isclose(a, b, abs_tol=REWARD_TOLERANCE) for a, b in zip(found, wanted, strict=False)):
        yield f"mean rewards are {found}, not {wanted}"


def table_rows(
    work: Mapping[str, Any], trl: Sequence[Lines], ours: Mapping[str, tuple[Ours, Sequence[Lines]]]
) -> list[dict[str, Any]]:
    """A row a kind of run, TRL's first.  Seconds are medians over the steps after the first of all its runs."""
    base = _row(work, TRL, f"1 x {work['threads']}", [[_trl_phases(line) for line in lines] for lines in trl])
    rows = [base]
    for name, (how, runs) in ours.items():
        rows.append(_row(work, name, how.layout, [[_our_phases(how, line) for line in lines] for lines in runs]))
    for row in rows:
        row["times_trl_step"] = base["step_s"] / row["step_s"]
        row["times_trl_run"] = base["total_s"] / row["total_s"]
    return rows


def _row(work: Mapping[str, Any], name: str, layout: str, runs: Sequence[Lines]) -> dict[str, Any]:
    lines = steady(runs)
    totals = [sum(line["step_s"] for line in run) for run in runs]
    steps = [line["step_s"] for line in lines]
    return {
        "run": name,
        "layout": layout,
        "step_s": median(steps),
        "min_step_s": min(steps),
        "max_step_s": max(steps),
        "first_step_s": median(run[0]["step_s"] for run in runs),
        **{part: _median([line[part] for line in lines]) for part in PARTS},
        "total_s": median(totals),
        "tokens_per_s": real_tokens(work) / median(totals),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _trl_phases(line: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: line[name] for name in ("step_s", "generate_s", "score_s", "train_s")}
    return {**named, "rest_s": line["other_s"]}


def _our_phases(how: Ours, line: Mapping[str, Any]) -> dict[str, Any]:
    """A step of ours by TRL's phases: what the actor's rank does, and what it waits for.

    If one rank decodes and scores in the same rounds, `generate` holds both, and `score` is unknown.
    """
    critic = (line["critic_update_s"] if how.shares_ranks else line.get("critic_exposed_s")) or 0.0
    step, train = line["step_s"], line["train_s"] + critic
    if how.streams_here:
        return {"step_s": step, "generate_s": step - train, "score_s": None, "train_s": train, "rest_s": None}
    generate, score = line["decode_s"], line["score_exposed_s"]
    parts = {"generate_s": generate, "score_s": score, "train_s": train}
    return {"step_s": step, **parts, "rest_s": step - sum(parts.values())}


def real_tokens(work: Mapping[str, Any]) -> int:
    """Prompt and response tokens of all steps, without padding."""
    return sum(map(len, work["prompts"])) + sum(work["lengths"])


def padding(trl: Sequence[Lines]) -> float:
    """Tokens that TRL computes with in scoring and training, for each real one."""
    lines = [line for run in trl for line in run]
    real = sum(sum(line["prompt_tokens"]) + sum(line["response_tokens"]) for line in lines)
    return float(sum(line["computed_tokens"] for line in lines) / real)


def forcing(trl: Sequence[Lines]) -> tuple[float, float]:
    """Return the cost of forcing lengths in TRL: seconds per step (median), and its share of the generation."""
    lines = steady(trl)
    return median(line["forcing_s"] for line in lines), sum(line["forcing_s"] for line in lines) / sum(
        line["generate_s"] for line in lines
    )


def draw(rows: Sequence[Mapping[str, Any]], title: str, out_png: str | os.PathLike[str]) -> None:
    """A bar a row: the seconds of a step by phase, and how many times as fast as TRL."""
    figure = new_figure(width_in=9.0, height_in=1.7 + 0.36 * len(rows))
    axes = figure.subplots()
    names, left = [row["run"] for row in rows], [0.0] * len(rows)
    for part, (label, colour) in PARTS.items():
        widths = [max(0.0, row[part] or 0.0) for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, row in enumerate(rows):
        text = f" {row['step_s']:.2f} s, x {row['times_trl_step']:.2f} (run x {row['times_trl_run']:.2f})"
        axes.text(max(left[place], row["step_s"]), place, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("seconds per step (medians of the steps after the first)")
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS), frameon=False)
    figure.savefig(out_png)
