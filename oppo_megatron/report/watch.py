"""`oppo report --watch`: a run's figures in the terminal until it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oppo_megatron.clock import format_duration
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.report.charts import COLOURS, RUN_COLOURS, short, show, smooth
from oppo_megatron.report.machine import USES, pools, steady, utilization_of
from oppo_megatron.report.run_records import (
    ALL_PARTS,
    RunRecord,
    deferred_counts,
    memory_peaks,
    number,
    read_run,
    split_step,
    without_downtime,
)
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace

END_OF_TRACE = 512 * 1024
END_OF_ROLLOUTS = 2 * 1024 * 1024
BLOCKS = "▁▂▃▄▅▆▇█"
GLYPHS = {"score": "▓", "update": "▒", "critic": "░", "idle": "·"}  # legible without colour
BAR, SPARK, NARROWEST = 30, 36, 6  # columns
RECENT = 10
QUIET_S = 120.0
SHOWN_RESPONSE = 400
FIGURES = {
    "reward_mean": "reward", "loss": "loss", "kl_mean": "KL to the reference", "entropy": "entropy",
    "trained_len_mean": "trained tokens", "submitted_len_mean": "submitted tokens", "length_gap": "length gap",
    "delta": "Δ", "chunk_tokens": "chunk", "reward_by_quarter.q1": "reward, shortest", "reward_by_quarter.q4": "reward, longest",
}  # fmt: skip


@dataclass(frozen=True)
class Glance:
    """A run now: last spans, newest response, seconds since its last line."""

    record: RunRecord
    newest: Mapping[str, Any] | None
    quiet_s: float | None


def watch(path: str | os.PathLike[str], interval_s: float, console: Console) -> None:
    """Show a run every `interval_s` seconds (0: once), until it has finished.  Raises DataError."""
    now = glance(path)
    if interval_s and console.is_terminal:
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(Group(*blocks(now, console.width)), refresh=True)
                if now.record.summary is not None:
                    break
                time.sleep(interval_s)
                now = glance(path)
    console.print(Group(*blocks(now, console.width)))


def glance(path: str | os.PathLike[str], now: float | None = None) -> Glance:
    """Read a run, possibly unfinished; `now`: seconds since the epoch.  Raises DataError."""
    run = RunDirectory(path)
    now = time.time() if now is None else now
    quiet_s = max(0.0, now - run.metrics.stat().st_mtime) if run.metrics.exists() else None
    record = read_run(path, spans=False)
    spans, no_spans = _last_spans(run)
    record = replace(record, spans=without_downtime(spans, record.lines), no_spans=no_spans)
    trained = (row for row in reversed(last_objects(run.rollouts, END_OF_ROLLOUTS)) if not row.get("greedy"))
    return Glance(record, next(trained, None), quiet_s)


def last_objects(path: Path, num_bytes: int) -> list[dict[str, Any]]:
    """Objects of complete lines in the last bytes of a JSONL file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[size > num_bytes : -1]:  # the last one is empty or half written
        with suppress(ValueError):
            if isinstance(value := read_json(line), dict):
                found.append(value)
    return found


def _last_spans(run: RunDirectory) -> tuple[list[Span], str]:
    """Spans of the last steps that every rank's tail covers, or the reason for none."""
    try:
        ranks = [[Span(**line) for line in last_objects(path, END_OF_TRACE)] for path in run.rank_traces()]
        if not any(ranks):
            return (read_trace(run.trace), "") if run.trace.exists() else ([], "run with logging.trace=true")
    except (TypeError, DataError) as error:
        return [], f"its trace is not readable ({error})"
    first = max((min(span.step for span in spans) for spans in ranks if spans), default=0)
    return [span for spans in ranks for span in spans if span.step >= first], ""


def blocks(now: Glance, width: int) -> Iterator[RenderableType]:
    record = now.record
    yield _head(now)
    for title, lines in (
        ("figures", _figures(record, width - 4)),
        ("step time", _step_time(record, width - 4)),
        ("utilisation", _utilization(record, width - 4)),
        ("newest response", _response(now)),
    ):
        yield Panel(lines, title=title, title_align="left", padding=(0, 1), border_style="dim")


def _head(now: Glance) -> Text:
    record = now.record
    done, total = (record.lines[-1]["step"] if record.lines else 0), record.config.get("steps")
    text = Text(f"{show(record.name)}  ", style="bold")
    text.append(f"step {done}" + (f" of {total}" if isinstance(total, int) else ""), style="not bold")
    recent = record.known("step_s")[1][-RECENT:]
    if record.summary is None and isinstance(total, int) and recent and total > done:
        text.append(f"  ETA {format_duration((total - done) * fmean(recent))}", style="not bold")
    if record.summary is not None:
        state, style = "finished", "green"
    elif now.quiet_s is None:
        state, style = "waiting for its first step", "yellow"
    elif now.quiet_s > max(QUIET_S, 5 * max(recent, default=0.0)):
        state, style = f"no step for {format_duration(now.quiet_s)}: it may have ended early", "red"
    else:
        state, style = f"last step {format_duration(now.quiet_s)} ago", "green"
    return text.append(f"  {state}", style=f"not bold {style}")


def _missing(record: RunRecord, what: str, why: str = "the run does not record it") -> Text:
    return Text(f"no {what} ({why if record.lines else 'no step has ended yet'})", style="dim")


def spark(values: Sequence[float], width: int = SPARK) -> str:
    """Values as blocks; means of neighbours beyond `width`."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [fmean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def _bar(parts: Sequence[tuple[float, str, str]], total: float, width: int) -> Text:
    text, reached, drawn = Text(), 0.0, 0
    for value, kind, colour in parts:
        reached += value
        end = round(width * min(1.0, reached / total)) if total > 0 else 0
        text.append(GLYPHS.get(kind, "█") * (end - drawn), style=colour)
        drawn = max(drawn, end)
    return text.append(" " * (width - drawn))


def _figures(record: RunRecord, width: int) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    for key, label in FIGURES.items():
        if values := record.known(key)[1]:
            means = smooth(values)
            reason = show(str(record.lines[-1].get(f"{key.split('_')[0]}_reason") or ""))
            change = f"{short(round(means[0], 4))} → {short(round(means[-1], 4))}"
            rows.add_row(label, change, Text(spark(means, max(NARROWEST, min(SPARK, width - 40))), RUN_COLOURS[5]), Text(reason))
    if counts := deferred_counts(record.lines):
        parts = [f"{times}× {100 * count / sum(counts.values()):.2f} %" for times, count in sorted(counts.items())]
        rows.add_row("deferrals", ", ".join(parts))
    for line in reversed(record.lines):
        if peaks := [(peak, rank) for rank, peak in enumerate(memory_peaks(line)) if peak is not None]:
            rows.add_row("memory", f"{short(round(max(peaks)[0]))} MiB", Text(f"rank {max(peaks)[1]}, the fullest"))
            break
    return rows if rows.row_count else _missing(record, "reward")


def _step_time(record: RunRecord, width: int) -> RenderableType:
    lines = [line for line in steady(record.lines)[-RECENT:] if number(line, "step_s") is not None]
    if not lines or record.kind == "supervised":
        return _missing(record, "split of the step time")
    splits = [split_step(line) for line in lines]
    means = [fmean(split[key] for split in splits) for key in ALL_PARTS]
    total, kinds = sum(means), ("decode", "score", "update", "critic", "idle")
    parts, words = [], []
    for mean, kind, (label, colour) in zip(means, kinds, ALL_PARTS.values(), strict=True):
        parts.append((mean, kind, colour))
        words.append(f"{GLYPHS.get(kind, '█')} {label} {mean:.3g} s ({100 * mean / (total or 1.0):.0f} %)")
    bar = _bar(parts, total, min(BAR, max(NARROWEST, width - 24)))
    return Group(Text.assemble(bar, f" {total:.3g} s, mean of {len(lines)}"), Text(", ".join(words)))


def _utilization(record: RunRecord, width: int) -> RenderableType:
    ranks = utilization_of(record)
    if not ranks:
        return _missing(record, "utilisation", record.no_spans or "no step is whole yet")
    named = {**pools(ranks), **{f"rank {row['rank']:<3.0f}": row for row in ranks}}
    widest, rows = max(map(len, named)), []
    for name, row in named.items():
        parts = [(max(0.0, row[use]), use, COLOURS[use]) for use in USES]
        bar = _bar(parts, 100.0, min(BAR, max(NARROWEST, width - widest - 7)))
        rows.append(Text.assemble(f"{name:<{widest}} ", bar, f" {100 - row['idle']:>3.0f} %"))
    return Group(*rows, Text("  ".join(f"{GLYPHS.get(use, '█')} {use}" for use in USES), style="dim"))


def _response(now: Glance) -> RenderableType:
    row = now.newest
    if row is None:
        return _missing(now.record, "responses", "run with logging.rollouts=true")
    reward, text = number(row, "reward"), show(str(row.get("response", "")))
    about = f"step {row.get('step')}, reward {'–' if reward is None else short(round(reward, 4))}"
    return Group(Text(about, style="bold"), Text(text[:SHOWN_RESPONSE] + (" …" if len(text) > SHOWN_RESPONSE else "")))
