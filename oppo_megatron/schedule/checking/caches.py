"""Whether the caches hold what a round adds to them.

That follows from the sizes of its micro-batches; all else that the checker looks for follows from the round's shape.  So the
schedule of a shape is checked once, and this for each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.rounds import KVBudget, Round

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
    cache, growths = f"the cache of {role} replica {replica}", _growths(round_, role, replica)
    lengths = {seq_id: past + new for seq_id, past, new in growths}
    if len(lengths) < len(growths):  # some grow twice, each time from where the time before has left them
        known = dict[int, int]()
        for seq_id, past, new in growths:
            if known.get(seq_id, past) != past:
                yield f"{cache} holds {known[seq_id]} tokens of sequence {seq_id}, which is to be continued at {past}"
                return
            known[seq_id] = past + new
    longest = max(lengths.values(), default=0)
    if lengths and budget.others + len(lengths) > budget.slots:
        yield f"{cache} has {budget.slots} slots, but {len(lengths)} sequences grow beside {budget.others} others"
    elif longest > budget.max_length:
        yield f"{cache} has room for {budget.max_length} tokens a sequence, but one grows to {longest}"


def _growths(round_: Round, role: str, replica: int) -> list[tuple[int, int, int]]:
    """What a replica's micro-batches add, in their order: sequence, tokens cached before, new ones."""
    prefill, steps = round_.prefill.get(role, ()), round_.steps
    growths = [g[:3] for batch in (prefill[replica] if replica < len(prefill) else ()) for g in batch]
    if role == "actor" and replica < len(round_.decode):
        growths += [(g.seq_id, g.past, min(g.new, steps)) for batch in round_.decode[replica] for g in batch]
    return growths
