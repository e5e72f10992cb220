"""Whether ranks that have planned a round each by itself have planned the same one, and what that round is as a whole.

A rank packs micro-batches of its own replicas only (`RoundPlanner.rank`), so no rank has the whole round.  It is put together
here from what most of each replica's ranks say; whoever says something else is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.checking.faults import Fault, FaultKind
from oppo_megatron.schedule.rounds import Batch, Fork, Round, Site

T = TypeVar("T", bound=Hashable)

Records = tuple[tuple[int, int], ...]
"""(sequence, tokens) of all that were decoded or scored in the round, as a rank had recorded them before."""


@dataclass(frozen=True)
class OwnPlan:
    """What one rank has planned of a round: `round` has the micro-batches of its own replicas, `actions` is its list."""

    records: Records
    round: Round
    actions: tuple[Action, ...]


def agree(plans: Mapping[int, OwnPlan], site: Site) -> tuple[Round, Schedule, list[Fault]]:
    """The round as a whole, all ranks' lists, and a fault for each rank that disagrees with more of its peers than agree."""
    records, faults = _most({rank: plan.records for rank, plan in plans.items()}), dict[int, Fault]()
    sizes = _most({rank: (plan.round.index, plan.round.steps) for rank, plan in plans.items()})
    for rank, plan in plans.items():
        if plan.records != records:
            faults[rank] = _fault(rank, plan, _records_told(plan.records, records))
        elif (plan.round.index, plan.round.steps) != sizes:
            own = f"plans round {plan.round.index} with {plan.round.steps} decode steps"
            told = f"{own}, most others round {sizes[0]} with {sizes[1]}"
            faults[rank] = _fault(rank, plan, told)
    decode, prefill, forks = _works(plans, site, faults)
    whole = Round(*sizes, decode, prefill, forks)
    schedule = Schedule({rank: plan.actions for rank, plan in plans.items() if plan.actions})
    return whole, schedule, [faults[rank] for rank in sorted(faults)]


def _works(
    plans: Mapping[int, OwnPlan], site: Site, faults: dict[int, Fault]
) -> tuple[
    tuple[Sequence[Batch], ...], dict[str, tuple[Sequence[Batch], ...]], dict[str, tuple[tuple[Fork, ...], ...]]
]:
    """Decode, prefill and forks of every replica.  Ranks that disagree about one of theirs are added to `faults`."""
    decode: list[Sequence[Batch]] = []
    prefill: dict[str, tuple[Sequence[Batch], ...]] = {}
    forks: dict[str, tuple[tuple[Fork, ...], ...]] = {}
    for role, placement in site.placements.items():
        replicas, forked = [], []
        for replica in range(placement.dp):
            said = {rank: _of(plans[rank].round, role, replica) for rank in placement.replica_ranks(replica)}
            most = _most(said)
            for rank, own in said.items():
                if own != most and rank not in faults:
                    what = "micro-batches" if own[:2] != most[:2] else "forks"
                    told = f"has other {what} of {role} replica {replica} than its peers"
                    faults[rank] = _fault(rank, plans[rank], told)
            replicas.append(most[1])
            forked.append(most[2])
            if role == "actor":
                decode.append(most[0])
        prefill[role] = tuple(replicas)
        if any(forked):
            forks[role] = tuple(forked)
    decodes = any(decode)
    return tuple(decode) if decodes else (), prefill, forks


def _of(round_: Round, role: str, replica: int) -> tuple[Sequence[Batch], Sequence[Batch], tuple[Fork, ...]]:
    """Decode and prefill micro-batches of one replica, and what it forks."""
    prefill = round_.prefill.get(role, ())
    decode = round_.decode if role == "actor" else ()
    return (
        decode[replica] if replica < len(decode) else (),
        prefill[replica] if replica < len(prefill) else (),
        round_.forks_of(role, replica),
    )


def _most(said: Mapping[int, T]) -> T:
    """What most ranks say; of two said as often, what the lower rank says."""
    return Counter(said.values()).most_common(1)[0][0]


def _records_told(own: Records, others: Records) -> str:
    """The first sequence that two ranks have recorded otherwise."""
    mine, theirs = dict(own), dict(others)
    seq_id = min(s for s in mine.keys() | theirs.keys() if mine.get(s) != theirs.get(s))

    def of(records: Mapping[int, int]) -> str:
        return f"{records[seq_id]} tokens" if seq_id in records else "none"

    number = sum(mine.get(s) != theirs.get(s) for s in mine.keys() | theirs.keys())
    count = "1 sequence" if number == 1 else f"{number} sequences"
    return f"has other records of {count} than most ranks: of sequence {seq_id} {of(mine)}, they {of(theirs)}"


def _fault(rank: int, plan: OwnPlan, told: str) -> Fault:
    rule = "all ranks plan from the same records by the same rules"
    remedy = "look for another configuration, seed, data or version of the code on its host"
    return Fault(FaultKind.PLAN, rank, len(plan.actions), None, f"it {told}; {rule}; {remedy}")
