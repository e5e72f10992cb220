"""Process groups of one role; megatron's global state stays unused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from oppo_megatron.cluster.process_groups import SharedGroups
from oppo_megatron.layout.placements import model_groups


@dataclass(frozen=True)
class RoleGroups:
    """`ranks[((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank]` is a global rank.

    megatron-core sees `copies` replicas in `collection`; the `cp` ranks of `context` share the sequences of one of `data`.
    `experts`: the ranks, `ep` neighbouring replicas' of a stage, that hold one set of experts.
    """

    collection: ProcessGroupCollection
    all: dist.ProcessGroup
    made: tuple[dist.ProcessGroup, ...]
    ranks: tuple[int, ...]
    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    data: dist.ProcessGroup
    context: dist.ProcessGroup
    experts: dist.ProcessGroup

    @property
    def copies(self) -> int:
        return self.dp * self.cp

    @property
    def tp_rank(self) -> int:
        return int(self.collection.tp.rank())

    @property
    def pp_rank(self) -> int:
        return int(self.collection.pp.rank())

    @property
    def dp_rank(self) -> int:
        return int(self.data.rank())

    @property
    def copy_rank(self) -> int:
        return int(self.collection.dp.rank())

    @property
    def place(self) -> int:
        """Number of this rank in its stage; it holds share `place % n` of a weight in n shares."""
        return self.copy_rank * self.tp + self.tp_rank

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def speaks(self) -> bool:
        """True on one rank of each replica that has its outputs."""
        return self.is_last_stage and self.tp_rank == 0 and self.context.rank() == 0

    @property
    def output_rank(self) -> int:
        """Global rank of the last stage, replica 0, tensor rank 0."""
        return self.ranks[(self.pp - 1) * (len(self.ranks) // self.pp)]


def build_groups(
    ranks: Sequence[int], tp: int, pp: int, role: str, shared: SharedGroups | None = None, cp: int = 1, ep: int = 1
) -> RoleGroups | None:
    """Build or share groups (tensor, context, data, experts, pipeline); None outside.  Collective, in the same order of roles."""
    parts, found = list(model_groups(ranks, tp, pp, role, cp, ep)), dict[str, dist.ProcessGroup]()
    shared = shared or SharedGroups()
    for part, name in parts:
        group = shared.get(*name)
        if group is not None:
            found[part] = group
    if "all" not in found:
        return None
    made = tuple(dict.fromkeys(found.values()))
    everyone, alone, own = found["all"], found["self"], found.get
    if ep == 1:
        found |= {"exchange": alone, "experts": found["tp"], "experts_pp": found["mp"], "experts_dp": found["dp"]}
    collection = ProcessGroupCollection(
        tp=own("tp"), pp=own("pp"), dp=own("dp"), mp=own("mp"), embd=own("embedding"), pos_embd=own("position"),
        dp_cp=own("dp"), intra_dp_cp=own("dp"), cp=alone, tp_cp=own("tp"), hcp=None, ep=own("exchange"),
        expt_tp=own("tp"), tp_ep=own("experts"), tp_ep_pp=own("experts_pp"), expt_dp=own("experts_dp"),
        intra_expt_dp=own("experts_dp"),
        tp_dp_cp=own("tp_dp"), inter_dist_opt=None, intra_dist_opt=everyone,
    )  # fmt: skip
    data, context = (found["dp"], alone) if cp == 1 else (found["data"], found["context"])
    dp = len(ranks) // (tp * pp * cp)
    return RoleGroups(collection, everyone, made, tuple(ranks), tp, pp, dp, cp, ep, data, context, found["experts"])
