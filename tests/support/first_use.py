"""NCCL's first use of a communicator: whoever comes waits until all members have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def turns(lists: Mapping[int, Sequence[T]], members: Callable[[T], Collection[int]]) -> int | None:
    """Turns in which each rank gets through its list, one use at most in each; None where some never do."""
    at, number = dict.fromkeys(lists, 0), 0
    while any(at[rank] < len(own) for rank, own in lists.items()):
        here = Counter(own[at[rank]] for rank, own in lists.items() if at[rank] < len(own))
        met = [each for each, present in here.items() if present == len(members(each))]
        if not met:
            return None
        for each in met:
            for rank in members(each):
                at[rank] += 1
        number += 1
    return number
