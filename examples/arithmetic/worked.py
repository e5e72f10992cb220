"""A reward that can tell early: 1 for a solution that is worked right line by line, 0 from its first slip on.

    rewards: [{kind: python, entry_point: "examples/arithmetic/worked.py:worked"}]
"""

from __future__ import annotations

import re
from typing import Any


def solution(prompt: str) -> str:
    """Of `Q: 7+5-3=?`, a partial result a line and then the answer."""
    first, *terms = re.findall(r"[+-]?\d+", prompt)
    total, lines = int(first), []
    for term in terms:
        lines.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return "\n".join([*lines, f"#### {total}"])


def worked(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """1 for the one right way to work a chain of additions and subtractions, else 0."""
    return float(response.strip() == solution(prompt))


def settled(prompt: str, prefix: str, fields: dict[str, Any]) -> float | None:
    """0 once a character is not that of the solution: nothing that follows takes it back."""
    begun, right = prefix.lstrip(), solution(prompt)
    return None if right.startswith(begun) or begun.rstrip() == right else 0.0


worked.settled = settled  # type: ignore[attr-defined]
