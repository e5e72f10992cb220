"""Whether the caches hold what a round adds to them.

That follows from the sizes of its micro-batches; all else that the checker looks for follows from the round's shape.  So the
schedule of a shape is checked once, and this for each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.rounds import Growths, KVBudget, Round

Budgets = Mapping[str, Sequence[KVBudget]]
"""What each replica of each role may cache; a role that is missing is not checked."""


def require_room(round_: Round, budgets: Mapping[str, Mapping[int, KVBudget]]) -> None:
    """Raises ScheduleError with every cache that the round overruns, or asks to continue what it does not hold.

    `budgets` are those of the replicas to be checked, by role and number.
    """
    faults = [
        text for role, own in budgets.items() for d, budget in own.items() for text in _of(round_, role, d, budget)
    ]
    if faults:
        count = "1 cache" if len(faults) == 1 else f"{len(faults)} caches"
        raise ScheduleError(
            f"{count} cannot take round {round_.index}:\n" + "".join(f"  - {text}\n" for text in faults)
        )


def _of(round_: Round, role: str, replica: int, budget: KVBudget) -> Iterator[str]:
    """The first thing that is wrong with one replica's cache."""
    cache, (seq_ids, past, new) = f"the cache of {role} replica {replica}", _growths(round_, role, replica)
    order = np.argsort(seq_ids, kind="stable")
    ids, begins, ends = seq_ids[order], past[order], (past + new)[order]
    again = ids[1:] == ids[:-1]  # some grow twice, each time from where the time before has left them
    broken = np.flatnonzero(again & (begins[1:] != ends[:-1]))
    if len(broken):
        first = broken[np.argmin(order[broken + 1])]
        yield f"{cache} holds {ends[first]} tokens of sequence {ids[first]}, which is to be continued at {begins[first + 1]}"
        return
    lengths = ends[np.append(~again, True)] if len(ends) else ends
    longest = int(lengths.max(initial=0))
    if len(lengths) and budget.others + len(lengths) > budget.slots:
        yield f"{cache} has {budget.slots} slots, but {len(lengths)} sequences grow beside {budget.others} others"
    elif longest > budget.max_length:
        yield f"{cache} has room for {budget.max_length} tokens a sequence, but one grows to {longest}"


def _growths(round_: Round, role: str, replica: int) -> Ints:
    """What a replica's micro-batches add, in their order: sequences, tokens cached before, new ones; [3, growths]."""
    prefill, steps = round_.prefill.get(role, ()), round_.steps
    tables = [Growths.of(batch).table[:3] for batch in (prefill[replica] if replica < len(prefill) else ())]
    if role == "actor" and replica < len(round_.decode):
        decode = [Growths.of(batch) for batch in round_.decode[replica]]
        tables += [np.stack([batch.seq_ids, batch.past, np.minimum(batch.new, steps)]) for batch in decode]
    return np.concatenate([np.zeros((3, 0), dtype=np.int64), *tables], axis=1)
