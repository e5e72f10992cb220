"""Whether a round's caches hold what it puts into them: asked of the round alone, whatever order its actions have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from oppo_megatron.schedule.rounds import Batch, KVBudget, Round

Budgets = Mapping[str, Sequence[KVBudget]]
"""What each replica of each role may cache; a role that is missing is not checked."""


def caches_hold(round_: Round, budgets: Budgets) -> bool:
    """Whether no cache has too few slots or is too short, and each micro-batch continues what is cached.

    Where not, the checker says which action is the first to find that out.
    """
    return all(
        _holds([*_of(round_.prefill.get(role, ()), d), *(_of(round_.decode, d) if role == "actor" else ())], budget)
        for role, own in budgets.items()
        for d, budget in enumerate(own)
    )


def _of(replicas: Sequence[Sequence[Batch]], replica: int) -> Sequence[Batch]:
    return replicas[replica] if replica < len(replicas) else ()


def _holds(batches: Sequence[Batch], budget: KVBudget) -> bool:
    """Of one replica, whose micro-batches these are in the order in which it does them."""
    cached: dict[int, int] = {}
    for growth in chain.from_iterable(batches):
        if cached.get(growth.seq_id, growth.past) != growth.past:
            return False
        cached[growth.seq_id] = growth.past + growth.new
    fits = max(cached.values(), default=0) <= budget.max_length
    return fits and (not cached or budget.others + len(cached) <= budget.slots)
