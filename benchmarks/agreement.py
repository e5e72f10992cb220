"""Check that all ranks have planned the same round, and assemble the whole round from their plans.

A rank packs micro-batches of its own replicas only (`RoundPlanner.rank`), so no rank has the whole round.  Each replica's part is
the plan of most of its ranks; a rank with another plan is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.checking.checker import Fault, FaultKind
from oppo_megatron.schedule.rounds import Batch, Fork, Round, Site

T = TypeVar("T", bound=Hashable)

Records = tuple[tuple[int, int], ...]
"""(sequence, tokens) of all sequences that are decoded or scored in the round, as a rank had recorded them before."""


@dataclass(frozen=True)
class OwnPlan:
    """One rank's plan of a round: `round` has the micro-batches of its own replicas, `actions` is its list."""

    records: Records
    round: Round
    actions: tuple[Action, ...]


def agree(plans: Mapping[int, OwnPlan], site: Site) -> tuple[Round, Schedule, list[Fault]]:
    """Return the whole round, the lists of all ranks, and a fault for each rank that disagrees with most of its peers."""
    records, faults = _most({rank: plan.records for rank, plan in plans.items()}), dict[int, Fault]()
    sizes = _most({rank: (plan.round.index, plan.round.steps) for rank, plan in plans.items()})
    for rank, plan in plans.items():
        if plan.records != records:
            faults[rank] = _fault(rank, plan, _difference(plan.records, records))
        elif (plan.round.index, plan.round.steps) != sizes:
            own = f"plans round {plan.round.index} with {plan.round.steps} decode steps"
            text = f"{own}, most others round {sizes[0]} with {sizes[1]}"
            faults[rank] = _fault(rank, plan, text)
    decode, prefill, forks = _works(plans, site, faults)
    whole = Round(*sizes, decode, prefill, forks)
    schedule = Schedule({rank: plan.actions for rank, plan in plans.items() if plan.actions})
    return whole, schedule, [faults[rank] for rank in sorted(faults)]


def _works(
    plans: Mapping[int, OwnPlan], site: Site, faults: dict[int, Fault]
) -> tuple[tuple[Sequence[Batch], ...], dict[str, tuple[Sequence[Batch], ...]], dict[str, tuple[tuple[Fork, ...], ...]]]:
    """Return decode, prefill and forks of every replica; ranks that disagree about their own are added to `faults`."""
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
                    text = f"has other {what} of {role} replica {replica} than its peers"
                    faults[rank] = _fault(rank, plans[rank], text)
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
    """Return decode micro-batches, prefill micro-batches and forks of one replica."""
    prefill = round_.prefill.get(role, ())
    decode = round_.decode if role == "actor" else ()
    return (
        tuple(decode[replica]) if replica < len(decode) else (),
        tuple(prefill[replica]) if replica < len(prefill) else (),
        round_.forks_of(role, replica),
    )


def _most(said: Mapping[int, T]) -> T:
    """Return the most frequent value; among equally frequent ones the value of the lowest rank."""
    return Counter(said.values()).most_common(1)[0][0]


def _difference(own: Records, others: Records) -> str:
    """Describe the first sequence whose records differ."""
    mine, theirs = dict(own), dict(others)
    seq_id = min(s for s in mine.keys() | theirs.keys() if mine.get(s) != theirs.get(s))

    def of(records: Mapping[int, int]) -> str:
        return f"{records[seq_id]} tokens" if seq_id in records else "none"

    number = sum(mine.get(s) != theirs.get(s) for s in mine.keys() | theirs.keys())
    count = "1 sequence" if number == 1 else f"{number} sequences"
    return f"has other records of {count} than most ranks: it has {of(mine)} of sequence {seq_id}, they {of(theirs)}"


def _fault(rank: int, plan: OwnPlan, text: str) -> Fault:
    rule = "all ranks plan from the same records by the same rules"
    remedy = "look for another configuration, seed, data or version of the code on its host"
    return Fault(FaultKind.PLAN, rank, len(plan.actions), None, f"it {text}; {rule}; {remedy}")
