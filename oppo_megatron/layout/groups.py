"""The process groups of a model's ranks, as lists of ranks; `mcore/groups.py` creates them.

Roles share a group if its ranks and its part in the model are the same.  Only tensor groups are each role's own, because roles
that decode and prefill at once would wait for each other's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALONE = "self"


class GroupName(NamedTuple):
    """Groups of the same label and ranks are one."""

    label: str
    ranks: tuple[int, ...]


def group_name(label: str, ranks: Sequence[int]) -> GroupName:
    return GroupName(label if len(ranks) > 1 else ALONE, tuple(ranks))


def model_groups(ranks: Sequence[int], tp: int, pp: int, role: str) -> Iterator[tuple[str, GroupName]]:
    """Yield (part in the model, group) of a model on `ranks` (tensor fastest, then data, then pipeline; megatron's order)."""
    per_stage = len(ranks) // pp
    assert per_stage % tp == 0 and per_stage * pp == len(ranks), (ranks, tp, pp)
    stages, replicas, shards = range(pp), range(per_stage // tp), range(tp)

    def rank(p: int, d: int, t: int) -> int:
        return ranks[p * per_stage + d * tp + t]

    ends = sorted({0, pp - 1})
    members = {
        "tp": [[rank(p, d, t) for t in shards] for p in stages for d in replicas],
        "pp": [[rank(p, d, t) for p in stages] for d in replicas for t in shards],
        "dp": [[rank(p, d, t) for d in replicas] for p in stages for t in shards],
        "mp": [[rank(p, d, t) for p in stages for t in shards] for d in replicas],
        "embedding": [[rank(p, d, t) for p in ends] for d in replicas for t in shards],
        "position": [[rank(0, d, t)] for d in replicas for t in shards],
        "tp_dp": [[rank(p, d, t) for d in replicas for t in shards] for p in stages],
        ALONE: [[each] for each in ranks],
        "all": [list(ranks)],
    }
    for part, groups in members.items():
        label = f"{role}.tp" if part == "tp" else part
        yield from ((part, group_name(label, own)) for own in groups)
