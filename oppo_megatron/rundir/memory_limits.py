"""`memory_limits.json`: limits of a run's work at once, after memory ran out among ranks that compute together.

A rank that runs out writes it and ends; every rank of the next start reads it.
"""

from __future__ import annotations

import json

from oppo_megatron.rundir.directory import RunDirectory, write_json


def read_memory_limits(run: RunDirectory) -> dict[str, int]:
    """The limits by name; none where memory never ran out.  A damaged file counts as none: they are found again."""
    try:
        found = json.loads(run.memory_limits.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {name: most for name, most in found.items() if isinstance(most, int) and most > 0}


def lower_memory_limit(run: RunDirectory, name: str, most: int) -> None:
    """Set the limit `name` to at most `most`, from the next start on."""
    limits = read_memory_limits(run)
    write_json(run.memory_limits, limits | {name: min(most, limits.get(name, most))})
