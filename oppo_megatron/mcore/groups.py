"""Process groups of one role: a `ProcessGroupCollection` of its own, so that megatron's global state stays unused.

Every rank of the world calls `build_groups` for every role in the same order, because creating a group is a collective
of the world.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from oppo_megatron.cluster.process_groups import new_group


@dataclass(frozen=True)
class RoleGroups:
    """Where one role lives, seen from one of its ranks.  `ranks[(pp_rank * dp + dp_rank) * tp + tp_rank]` is a global rank.

    `made`: all groups of this rank, in the order in which they were made.
    """

    collection: ProcessGroupCollection
    all: dist.ProcessGroup
    made: tuple[dist.ProcessGroup, ...]
    ranks: tuple[int, ...]
    tp: int
    pp: int
    dp: int

    @property
    def tp_rank(self) -> int:
        return int(self.collection.tp.rank())

    @property
    def pp_rank(self) -> int:
        return int(self.collection.pp.rank())

    @property
    def dp_rank(self) -> int:
        """Which replica of the model this rank holds a part of."""
        return int(self.collection.dp.rank())

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def output_rank(self) -> int:
        """The global rank that speaks for the role's output: last stage, replica 0, tensor rank 0."""
        return self.ranks[(self.pp - 1) * (len(self.ranks) // self.pp)]


def build_groups(ranks: Sequence[int], tp: int, pp: int, name: str) -> RoleGroups | None:
    """Groups of a model on `ranks` (order: tensor fastest, then data, then pipeline; megatron's own).

    Returns None on a rank that is not among `ranks`, which nevertheless has to make the call.
    """
    per_stage = len(ranks) // pp
    assert per_stage % tp == 0 and per_stage * pp == len(ranks), (ranks, tp, pp)
    dp = per_stage // tp
    stages, replicas, shards = range(pp), range(dp), range(tp)

    def rank(p: int, d: int, t: int) -> int:
        return ranks[(p * dp + d) * tp + t]

    made: list[dist.ProcessGroup] = []

    def mine(groups: Iterable[list[int]], what: str) -> dist.ProcessGroup | None:
        found = _make(groups, f"{name}.{what}")
        made.extend([] if found is None else [found])
        return found

    tp_group = mine([[rank(p, d, t) for t in shards] for p in stages for d in replicas], "tp")
    pp_group = mine([[rank(p, d, t) for p in stages] for d in replicas for t in shards], "pp")
    dp_group = mine([[rank(p, d, t) for d in replicas] for p in stages for t in shards], "dp")
    mp_group = mine([[rank(p, d, t) for p in stages for t in shards] for d in replicas], "mp")
    ends = sorted({0, pp - 1})
    embedding = mine([[rank(p, d, t) for p in ends] for d in replicas for t in shards], "embedding")
    position = mine([[rank(0, d, t)] for d in replicas for t in shards], "position")
    tp_dp = mine([[rank(p, d, t) for d in replicas for t in shards] for p in stages], "tp_dp")
    alone = mine([[r] for r in ranks], "self")
    everyone = mine([list(ranks)], "all")
    if everyone is None:
        return None
    collection = ProcessGroupCollection(
        tp=tp_group, pp=pp_group, dp=dp_group, mp=mp_group, embd=embedding, pos_embd=position,
        dp_cp=dp_group, intra_dp_cp=dp_group, cp=alone, tp_cp=tp_group, hcp=None, ep=alone,
        expt_tp=tp_group, tp_ep=tp_group, tp_ep_pp=mp_group, expt_dp=dp_group, intra_expt_dp=dp_group,
        tp_dp_cp=tp_dp, inter_dist_opt=None, intra_dist_opt=everyone,
    )  # fmt: skip
    return RoleGroups(collection, everyone, tuple(made), tuple(ranks), tp, pp, dp)


def _make(groups: Iterable[list[int]], desc: str) -> dist.ProcessGroup | None:
    """Make a group of each of the lists of members, which share no rank.  Returns this rank's, if it has one."""
    found = None
    for members in groups:
        group = new_group(members, desc)
        if dist.get_rank() in members:
            found = group
    return found
