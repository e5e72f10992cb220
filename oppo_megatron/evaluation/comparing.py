"""Policies compared on the same prompts, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oppo_megatron.control.estimates import Estimate, estimate, paired_difference
from oppo_megatron.evaluation.grading import Answer

LENGTH = "response tokens"


@dataclass(frozen=True)
class Judged:
    """A policy's answers and their scores by part."""

    name: str
    answers: Sequence[Answer]
    grades: Sequence[Mapping[str, float]]

    def by_prompt(self, metric: str) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for answer, grade in zip(self.answers, self.grades, strict=True):
            value = float(answer.num_tokens) if metric == LENGTH else grade[metric]
            found.setdefault(answer.row, []).append(value)
        return found

    def finish_reasons(self) -> dict[str, float]:
        counts = Counter(answer.finish_reason for answer in self.answers)
        return {reason: count / len(self.answers) for reason, count in sorted(counts.items())}


def as_json(policies: Sequence[Judged], metrics: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    first, entries = policies[0], []
    for policy in policies:
        entry = {
            "policy": policy.name,
            "prompts": len(policy.by_prompt(LENGTH)),
            "responses": len(policy.answers),
            "metrics": {m: asdict(estimate(policy.by_prompt(m))) for m in (*metrics, LENGTH)},
            "finish_reasons": policy.finish_reasons(),
        }
        if policy is not first:
            entry["difference"] = {m: asdict(_difference(first, policy, m)) for m in (*metrics, LENGTH)}
        entries.append(entry)
    return {"settings": dict(settings), "policies": entries}


def as_table(policies: Sequence[Judged], metrics: Sequence[str]) -> str:
    """A row per metric, a column per policy, with paired differences from the first."""
    first, rest = policies[0], policies[1:]
    head = ["", first.name]
    for policy in rest:
        head += [policy.name, f"minus {first.name}" if len(rest) == 1 else "minus the first"]
    rows = [head]
    for metric in (*metrics, LENGTH):
        row = [metric, _shown(estimate(first.by_prompt(metric)))]
        for policy in rest:
            row += [_shown(estimate(policy.by_prompt(metric))), _shown(_difference(first, policy, metric), sign="+")]
        rows.append(row)
    reasons = sorted({reason for policy in policies for reason in policy.finish_reasons()})
    for reason in reasons:
        row = [f"ended by {reason}", _share(first, reason)]
        for policy in rest:
            row += [_share(policy, reason), ""]
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _difference(first: Judged, policy: Judged, metric: str) -> Estimate:
    return paired_difference(first.by_prompt(metric), policy.by_prompt(metric))


def _share(policy: Judged, reason: str) -> str:
    return f"{100 * policy.finish_reasons().get(reason, 0.0):.1f} %"


def _shown(value: Estimate, sign: str = "") -> str:
    digits = "+.4g" if sign else ".4g"
    error = "" if value.error is None else f" ± {value.error:.2g}"
    return f"{format(value.mean, digits)}{error}"
