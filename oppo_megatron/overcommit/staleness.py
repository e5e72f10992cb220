"""A bound on how old a group may be when it is trained, which throws nothing away.

Legend: G groups held; a group's *age* is the number of batches that have left without it; B groups make a batch, none may be
older than η when it is trained.

Waiting for a group only when it may not be deferred again is too late where more than B come due at once.  So with S_k, the
groups of age η - k or more, a batch has at least

    r_k = max(0, |S_k| - k B)    of S_k,    for k = 0 .. η

Then |S_k| <= (k + 1) B before each batch, if no more than (η + 1) B groups are ever held: what is in S_k now was in S_{k+1} one
batch ago, and that batch left behind at most (k + 1) B of it.  Hence r_k <= B, and since each S_k holds the one before, one batch
can serve them all; r_0 is the whole of S_0.  docs/algorithm.md has the proof in full.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oppo_megatron.columns import Bools, Ints


def due(ages_G: Ints, batch: int, most: int) -> Iterator[tuple[Bools, int]]:
    """(S_k, r_k) for each k that asks for anything, oldest first; `most` is η."""
    for k in range(min(most, len(ages_G) // batch) + 1):
        members_G = ages_G >= most - k
        needed = int(members_G.sum()) - k * batch
        if needed > 0:
            yield members_G, needed


def settled(finished_G: Bools, clocks_G: Ints, ages_G: Ints, batch: int, most: int, target: int) -> Ints:
    """The groups that the next batch of `target` groups will have, whatever is decoded from here on.

    The oldest, finished or not; then the first finishers of each S_k up to r_k; then of all, but for places that some S_k needs
    for groups that have not finished.  Where a batch is ready, these are the batch.
    """
    finishers = np.flatnonzero(finished_G)
    chosen_G, reserved = ages_G >= most, 0
    if chosen_G.sum() > target:  # settings that were changed within a run may have left more than fit; the first admitted
        return np.flatnonzero(chosen_G)[:target]
    for members_G, needed in due(ages_G, batch, most):
        missing = needed - int((chosen_G & members_G).sum()) - reserved  # those reserved for an older class are members, too
        room = target - int(chosen_G.sum()) - reserved
        first = _first(finishers[(members_G & ~chosen_G)[finishers]], clocks_G, min(missing, room))
        chosen_G[first] = True
        reserved += max(0, missing - len(first))
    places = target - int(chosen_G.sum()) - reserved
    chosen_G[_first(finishers[~chosen_G[finishers]], clocks_G, places)] = True
    return np.flatnonzero(chosen_G)


def _first(groups: Ints, clocks_G: Ints, number: int) -> Ints:
    """The `number` of the groups that finished first, ties in their order.  Nothing is sorted where there are no more."""
    if len(groups) <= max(0, number):
        return groups
    return groups[np.argsort(clocks_G[groups], kind="stable")][: max(0, number)]


def needed_batch(ages: Ints, most: int) -> int:
    """The least B with which groups of these ages can all be trained in time: |S_k| <= (k + 1) B for each k."""
    return max((-(-int((ages >= most - k).sum()) // (k + 1)) for k in range(most + 1)), default=0)
