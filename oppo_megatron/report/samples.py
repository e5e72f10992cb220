"""Responses to read: a few of the first, the middle and the last step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.errors import DataError
from oppo_megatron.report.run_records import RunRecord, number
from oppo_megatron.rundir.metrics_log import iter_json_lines

STEP_OF_LINE = re.compile(rb'\{"step": (\d+),')


def sample_responses(record: RunRecord) -> tuple[list[Mapping[str, Any]], str]:
    """Trained rollouts of the first, the middle and the last step: lowest, middle and highest reward, and the longest.

    In the order of steps and rewards; and where there are none, why.
    """
    if not record.run.rollouts.exists():
        return [], "it was not asked for: run with logging.rollouts=true"
    steps = [line["step"] for line in record.lines if not line.get("skipped")]
    wanted = {steps[0], steps[len(steps) // 2], steps[-1]} if steps else set()
    by_step: dict[int, list[Mapping[str, Any]]] = {step: [] for step in sorted(wanted)}

    def is_wanted(line: bytes) -> bool:
        # As the journal writes it the step comes first: of a large file, lines of other steps are not read as JSON.
        match = STEP_OF_LINE.match(line)
        return match is None or int(match[1]) in wanted

    try:
        for row in iter_json_lines(record.run.rollouts, is_wanted):
            if row.get("step") in by_step and number(row, "reward") is not None and not row.get("greedy"):
                by_step[row["step"]].append(row)
    except DataError as error:
        return [], str(error)
    chosen = [row for rows in by_step.values() for row in _few(rows)]
    return chosen, "" if chosen else "rollouts.jsonl has none of the steps in metrics.jsonl"


def _few(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not rows:
        return []
    by_reward = sorted(rows, key=lambda row: row["reward"])
    longest = max(rows, key=_num_tokens)
    few = [by_reward[0], by_reward[len(rows) // 2], by_reward[-1], longest]
    return [row for place, row in enumerate(few) if all(row is not earlier for earlier in few[:place])]


def _num_tokens(row: Mapping[str, Any]) -> int:
    tokens = row.get("tokens")
    return len(tokens) if isinstance(tokens, list) else 0
