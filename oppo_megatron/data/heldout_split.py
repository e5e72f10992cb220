"""Draws the held-out rows of supervised data: whole prompts, by the seed."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.evaluation import HeldoutConfig
from oppo_megatron.errors import DataError

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])


def read_heldout(
    evaluation: HeldoutConfig | None, seed: int, rows: list[RowT], read: Callable[[DataConfig], list[RowT]]
) -> tuple[list[RowT], list[RowT]]:
    """(rows to train on, rows held out), which are of `rows` or of files of their own, which `read` reads.

    Raises DataError.
    """
    if evaluation is None:
        return rows, []
    if evaluation.data is not None:
        return rows, read(evaluation.data)
    assert evaluation.fraction is not None, "the cross-checks ask for one of both"
    return split_rows(rows, evaluation.fraction, seed)


def split_rows(rows: Sequence[RowT], fraction: float, seed: int) -> tuple[list[RowT], list[RowT]]:
    """(rows to train on, rows held out), each in the order of `rows`.

    Rows of one prompt (their first part) stay on one side, so that nothing held out has been seen.  Prompts are drawn by a
    hash of theirs and the seed, until `fraction` of the rows, rounded, and one at least, is reached; one with more rows than
    are still wanted is passed over.  Raises DataError where that holds out nothing, or leaves nothing.
    """
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_prompt[hashlib.sha256(array("q", [seed, *row[0]]).tobytes()).digest()].append(place)
    wanted = max(1, round(fraction * len(rows)))
    held: set[int] = set()
    for _, places in sorted(by_prompt.items()):
        if len(held) + len(places) <= wanted:
            held.update(places)
    if not held or len(held) == len(rows):
        raise DataError(
            f"evaluation.fraction is {fraction}, which of {len(rows)} rows with {len(by_prompt)} different prompts holds out "
            f"{len(held)}: rows of one prompt stay together, and both sides need some; name files of held-out rows with "
            "evaluation.data, or give more rows"
        )
    return [row for place, row in enumerate(rows) if place not in held], [rows[place] for place in sorted(held)]


def describe_seen(held: Iterable[Sequence[int]], trained: Iterable[Sequence[int]]) -> list[str]:
    """A line where prompts that are held out, as tokens, are trained on, too."""
    ours, theirs = list(map(tuple, held)), set(map(tuple, trained))
    seen = sum(prompt in theirs for prompt in ours)
    if not seen:
        return []
    return [f"{seen} of {len(ours)} held-out prompts are trained on, too: figures of these say little of other prompts"]
