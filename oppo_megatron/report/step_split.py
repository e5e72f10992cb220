"""Where the time of a step goes, on the rank that keeps the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_megatron.report.run_records import number

# field -> label, colour
STEP_PARTS = {
    "decode_s": ("decode", "decode"),
    "score_exposed_s": ("exposed scoring", "score"),
    "train_s": ("training: actor", "update"),
    "critic_exposed_s": ("training: critic, exposed", "critic"),
}
IDLE = "idle_s"
ALL_PARTS = {**STEP_PARTS, IDLE: ("idle and other", "idle")}


def split_step(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of `line["step_s"]` by part; they add up to it, or to more where the parts alone are more.

    Where a rank scores within decoding rounds, that scoring is taken off decoding, for it has a part of its own; so are
    the waits for the actor's pipeline, which are idle time.  Idle is what is left: those waits, waits for other ranks,
    planning, and writing of logs.
    """
    parts = {key: number(line, key) or 0.0 for key in STEP_PARTS}
    step_s = number(line, "step_s") or 0.0
    parts["decode_s"] = max(0.0, parts["decode_s"] - max(0.0, sum(parts.values()) - step_s))
    parts["decode_s"] *= 1.0 - (number(line, "bubble_share") or 0.0)
    return {**parts, IDLE: max(0.0, step_s - sum(parts.values()))}
