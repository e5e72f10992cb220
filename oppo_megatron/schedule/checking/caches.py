from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.rounds import Fork, Forks, KVBudget, Round, joined

Budgets = Mapping[str, Sequence[KVBudget]]
"""Capacity of each replica's cache, by role; a missing role is not checked."""


def listed(faults: Sequence[object]) -> str:
    """A line each of the first ten, and the number of the others."""
    more = [f"  and {len(faults) - 10} more\n"] if len(faults) > 10 else []
    return "".join([*(f"  - {fault}\n" for fault in faults[:10]), *more])


def require_room(round_: Round, budgets: Mapping[str, Mapping[int, KVBudget]]) -> None:
    """Raise ScheduleError with each fault of the caches in `budgets`."""
    faults = [text for role, own in budgets.items() for d, each in own.items() for text in cache_faults(round_, role, d, each)]
    if faults:
        count = "1 cache" if len(faults) == 1 else f"{len(faults)} caches"
        raise ScheduleError(f"{count} cannot take round {round_.index}:\n{listed(faults)}")


def cache_faults(round_: Round, role: str, replica: int, budget: KVBudget | None) -> Iterator[str]:
    """Yield a replica's first fault, of its size only with `budget`."""
    cache, prefill = f"the cache of {role} replica {replica}", round_.prefill.get(role, ())
    growths = joined(prefill[replica] if replica < len(prefill) else ()).table[:3]
    if role == "actor" and replica < len(round_.decode):
        seq_ids, past, new = joined(round_.decode[replica]).table[:3]
        growths = np.concatenate([growths, np.stack([seq_ids, past, np.minimum(new, round_.steps)])], axis=1)
    seq_ids, past, new = growths
    lengths = past + new
    if len(seq_ids) and np.bincount(seq_ids - seq_ids.min()).max() > 1:
        order = np.argsort(seq_ids, kind="stable")
        ids, begins, ends = seq_ids[order], past[order], lengths[order]
        again = ids[1:] == ids[:-1]  # a sequence that grows twice continues from its previous end
        broken = np.flatnonzero(again & (begins[1:] != ends[:-1]))
        if len(broken):
            first = broken[np.argmin(order[broken + 1])]
            yield f"{cache} holds {ends[first]} tokens of sequence {ids[first]}, which is to be continued at {begins[first + 1]}"
            return
        lengths = ends[np.append(~again, True)]
    if forks := round_.forks_of(role, replica):
        fault = _fork_fault(cache, growths.T.tolist(), forks)
        if fault is not None:
            yield fault
            return
    if budget is None:
        return
    longest = int(lengths.max(initial=0))
    if len(lengths) and budget.others + len(lengths) > budget.slots:
        yield f"{cache} has {budget.slots} slots, but {len(lengths)} sequences grow and {budget.others} others keep theirs"
    elif longest > budget.max_length:
        yield f"{cache} has room for {budget.max_length} tokens per sequence, but one grows to {longest}"


def _fork_fault(cache: str, growths: Sequence[Sequence[int]], forks: Sequence[Fork]) -> str | None:
    cached = {fork.source: fork.held for fork in forks}
    made, left = dict[int, int](), Forks(forks)
    sources = {fork.target: fork for fork in forks}
    if len(sources) < len(forks) or sources.keys() & cached.keys():
        return f"{cache} is to fork a sequence twice, or onto one that others are forked from"

    def make(source: int) -> None:
        made.update((fork.target, fork.tokens) for fork in left.due(source, cached[source]))

    for source in left.sources:
        make(source)
    for seq_id, past, new in growths:
        if seq_id in sources and made.get(seq_id) != past:
            return f"{cache} is to continue sequence {seq_id} at {past} tokens, {_state(sources[seq_id], made, cached)}"
        if seq_id in cached:
            if cached[seq_id] != past:
                return f"{cache} holds {cached[seq_id]} tokens of sequence {seq_id}, which is to be continued at {past}"
            cached[seq_id] = past + new
            make(seq_id)
        elif seq_id in sources:
            made[seq_id] = past + new
    unmade = next((fork for fork in forks if fork.target not in made), None)
    return None if unmade is None else f"{cache} is to fork sequence {unmade.target}, {_state(unmade, made, cached)}"


def _state(fork: Fork, made: Mapping[int, int], cached: Mapping[int, int]) -> str:
    if fork.target in made:
        return f"but it holds {made[fork.target]} of it, forked from sequence {fork.source}"
    return f"forked from {fork.tokens} of sequence {fork.source}, but it holds {cached[fork.source]} of that one by then"
