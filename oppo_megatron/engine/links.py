"""The process groups of the links that a schedule may send over (`schedule/links.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.links import Link, lanes_of
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class Links:
    """This rank's links."""

    groups: dict[Link, dist.ProcessGroup]

    def of(self, action: Action) -> dist.ProcessGroup:
        """The group that a send or recv goes over."""
        assert action.peer is not None and action.payload is not None
        ends = (action.rank, action.peer) if action.op is Op.SEND else (action.peer, action.rank)
        return self.groups[ends[0], ends[1], action.role, action.payload]


def build_links(site: Site) -> Links:
    """Create the groups of all links.  Every rank of the world makes the call."""
    rank, groups = dist.get_rank(), {}
    for lane in lanes_of(site):
        group = new_group(lane.ranks, lane.label)
        groups |= {link: group for link in lane.links if rank in link[:2]}
    return Links(groups)
