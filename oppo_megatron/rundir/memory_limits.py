"""`memory_limits.json`: limits of a run's work at once, after memory ran out among ranks that compute together.

A rank that runs out writes it and ends; every rank of the next start reads it.  It holds for the layout in which memory ran out:
in another a rank has another share of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.directory import RunDirectory, write_json


def read_memory_limits(run: RunDirectory, layout: Mapping[str, Any]) -> dict[str, int]:
    """The limits by name; none where memory never ran out in this `layout` (`layout.placements.layout_tree`).

    A damaged file counts as none: they are found again.
    """
    try:
        found = read_json(run.memory_limits.read_text(encoding="utf-8"))
        limits = found["limits"] if found["layout"] == layout else {}
        return {name: most for name, most in limits.items() if isinstance(most, int) and most > 0}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def lower_memory_limit(run: RunDirectory, layout: Mapping[str, Any], name: str, most: int) -> None:
    """Set the limit `name` to at most `most`, from the next start in this layout on."""
    limits = read_memory_limits(run, layout)
    write_json(run.memory_limits, {"layout": layout, "limits": limits | {name: min(most, limits.get(name, most))}})
