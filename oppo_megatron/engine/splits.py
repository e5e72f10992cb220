"""A micro-batch through a pipeline stage: at once, or, if memory does not suffice, in splits one after the other.

The stage's output for the micro-batch is the same either way, up to rounding, so no other rank has to know.  Splits contain no
collectives except tensor-parallel ones, and with these a rank is not alone (`obstacle`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.out_of_memory import Done, MemoryLimit, attempt, halves
from oppo_megatron.schedule.rounds import Batch

Splits = list[tuple[Batch, Tensor]]
"""Parts of a micro-batch in its order, each with what the stage gives for it."""

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")
Undo = Callable[[list[RowT]], None]


def obstacle(model: RoleModel) -> str | None:
    """Why this rank may not cut a micro-batch by itself; None where it may."""
    if model.groups.tp == 1:
        return None
    return "the other ranks of its tensor-parallel group compute the same micro-batch"


def prefill(
    cache: SequenceCache,
    batch: Batch,
    hidden_T: Tensor | None,
    advance: Callable[[Batch, Tensor | None, bool], Tensor],
    memory_limit: MemoryLimit,
    obstacle: str | None,
    whole: bool = True,
) -> Splits:
    """Append a micro-batch to the cache by `advance(split, its part of hidden_T, whether it is the whole)`.

    Where a call of `advance` runs out of memory the cache is taken back to what it was.  Raises CapacityError where a single
    token is too much.
    """
    for growth in batch:  # what was planned on other books would be computed of other tokens
        cached = cache.length(growth.seq_id)
        assert cached == growth.past, (
            f"sequence {growth.seq_id} has {cached} tokens cached, but {growth.past} are planned"
        )
    tokens = sum(growth.new for growth in batch)
    if tokens <= memory_limit.within(tokens):
        outcome = attempt(lambda: advance(batch, hidden_T, whole))
        if isinstance(outcome, Done):
            return [(batch, outcome.result)]
        for growth in batch:
            cache.truncate(growth.seq_id, growth.past)
        last = f"sequence {batch[0].seq_id}, {batch[0].past + 1} tokens long," if tokens == 1 else None
        memory_limit.lower(tokens, outcome.told, last=last, obstacle=obstacle)
    first, second = halves(batch)
    at = sum(growth.new for growth in first)
    parts = (None, None) if hidden_T is None else hidden_T.split([at, tokens - at])
    return [
        *prefill(cache, first, parts[0], advance, memory_limit, obstacle, whole=False),
        *prefill(cache, second, parts[1], advance, memory_limit, obstacle, whole=False),
    ]


def by_rows(
    rows: list[RowT],
    inputs_R: Tensor | None,
    work: Callable[[list[RowT], Tensor | None, bool], ResultT],
    undo: Undo[RowT],
    memory_limit: MemoryLimit,
    obstacle: str | None,
    name: Callable[[RowT], str],
    whole: bool = True,
) -> list[ResultT]:
    """`work(rows, their part of inputs_R, whether they are all)` of a decode step, in as few splits as memory allows.

    `undo` takes back what a call that ran out of memory may have done; `name` is a row's, for the error where it is one too many.
    """
    if len(rows) <= memory_limit.within(len(rows)):
        outcome = attempt(lambda: work(rows, inputs_R, whole))
        if isinstance(outcome, Done):
            return [outcome.result]
        undo(rows)
        memory_limit.lower(len(rows), outcome.told, last=name(rows[0]) if len(rows) == 1 else None, obstacle=obstacle)
    half = len(rows) // 2
    parts = (None, None) if inputs_R is None else inputs_R.split([half, len(rows) - half])
    return [
        *by_rows(rows[:half], parts[0], work, undo, memory_limit, obstacle, name, whole=False),
        *by_rows(rows[half:], parts[1], work, undo, memory_limit, obstacle, name, whole=False),
    ]
