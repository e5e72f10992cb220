"""Each rank's share of useful work, from the traces of runs (the paper's Figure 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from oppo_megatron.errors import DataError
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace

KINDS = ("decode", "score", "update")


def utilization(runs: Sequence[Path]) -> list[dict[str, float]]:
    """Return each rank's number and the percent of its time after the first step for decoding, scoring, updates and idling.

    The time counts from the first work of step 2 on any rank (of step 1 if it is the only one) to the last work of the
    run.  A span of decoding or scoring includes what the loop does between its actions.  Waiting, messages and the
    exchange of scores count as idle.  Several runs are summed.
    """
    return shares([(str(run), read_trace(RunDirectory(run).trace)) for run in runs])


def shares(traces: Sequence[tuple[str, Sequence[Span]]]) -> list[dict[str, float]]:
    """Compute `utilization` from (name, spans) of each run; the name is for the error."""
    busy: dict[int, dict[str, float]] = {}
    total_s = 0.0
    for name, spans in traces:
        start, end = _window(name, spans)
        total_s += end - start
        for span in spans:
            seconds = busy.setdefault(span.rank, dict.fromkeys(KINDS, 0.0))
            if (kind := kind_of(span)) is not None:
                seconds[kind] += max(0.0, min(span.end, end) - max(span.start, start))
    rows = []
    for rank, seconds in sorted(busy.items()):
        percent = {kind: 100 * value / total_s for kind, value in seconds.items()}
        rows.append({"rank": rank, **percent, "idle": 100 - sum(percent.values())})
    return rows


def work_seconds(run: Path) -> dict[int, dict[int, float]]:
    """Seconds of work by rank, then by step, without waits."""
    work: dict[int, dict[int, float]] = {}
    for span in _work(str(run), read_trace(RunDirectory(run).trace)):
        steps = work.setdefault(span.rank, {})
        steps[span.step] = steps.get(span.step, 0.0) + span.end - span.start
    return work


def kind_of(span: Span) -> str | None:
    """The entry of `KINDS` for the span's work; None for other work and waits.

    Spans are named by label, or by action (`prefill reward m0 c3`) in a run with `logging.trace: actions`.
    """
    word = span.name.split(" ")[0]
    if word in ("decode", "sample") or (word == "prefill" and span.role == "actor"):
        return "decode"
    if word in ("score", "prefill"):
        return "score"
    return "update" if word == "update" else None


def _work(run: str, spans: Iterable[Span]) -> list[Span]:
    """The spans of work.  Raises DataError if there are none."""
    work = [span for span in spans if kind_of(span) is not None]
    if not work:
        raise DataError(f"{run}: its trace has no work of any step; run it again with logging.trace=true")
    return work


def _window(run: str, spans: Iterable[Span]) -> tuple[float, float]:
    work = _work(run, spans)
    later = [span for span in work if span.step > 1] or work
    return min(span.start for span in later), max(span.end for span in work)
