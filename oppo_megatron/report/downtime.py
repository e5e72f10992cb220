"""Removes the time between a run's stop and its resumption from its spans."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from oppo_megatron.rundir.trace import Span

SHORTEST_S = 1.0


def without_downtime(spans: Sequence[Span], lines: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The spans, in order of their starts, as if each attempt had begun where the one before ended.

    Downtime is a stretch in which no rank has a span, longer than the metrics say that the steps on both sides of it
    took: it is no part of either.  The last span before it and the first behind it name these steps.
    """
    took_s = {line["step"]: _seconds(line, "step_s") + _seconds(line, "checkpoint_s") for line in lines}
    order = sorted(spans, key=lambda span: span.start)
    starts, gaps = [], []  # of each stretch of downtime: where it ends, and its seconds
    reached = order[0] if order else None
    for span in order:
        assert reached is not None
        gap = span.start - reached.end
        if gap > max(SHORTEST_S, *(took_s.get(step, math.inf) for step in (reached.step, span.step))):
            starts.append(span.start)
            gaps.append(gap)
        if span.end >= reached.end:
            reached = span
    if not gaps:
        return order
    shifts = [0.0, *accumulate(gaps)]
    moved = []
    for span in order:
        shift = shifts[bisect_right(starts, span.start)]
        moved.append(replace(span, start=span.start - shift, end=span.end - shift))
    return moved


def _seconds(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
