"""Process groups of the links that a schedule may use (`schedule/links.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.schedule.actions import Action
from oppo_megatron.schedule.links import Link, in_waves, lanes_of, link_of
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class Links:
    """This rank's links, in the order of their first use."""

    groups: dict[Link, dist.ProcessGroup]

    def of(self, action: Action) -> dist.ProcessGroup:
        """The group of a send or recv."""
        return self.groups[link_of(action)]

    def use_once(self, device: torch.device) -> None:
        """Send one number over each link.  All ranks that have links make the call.

        NCCL makes the communicator of a pair in its first message, and blocks both hosts until the other end has come; a
        collective of the two would make another communicator.  So the first messages are sent here, in an order without
        cycles of waiting ranks (`in_waves`), and not in a round.
        """
        rank = dist.get_rank()
        for (source, destination, *_), group in self.groups.items():
            number = torch.zeros(1, device=device)
            work = dist.isend(number, destination, group) if rank == source else dist.irecv(number, source, group)
            assert work is not None, "this rank is an end of each of its links"
            work.wait()


def build_links(site: Site) -> Links:
    """Create the groups of all links.  Every rank of the world makes the call."""
    rank, groups = dist.get_rank(), dict[Link, dist.ProcessGroup]()
    lanes = list(lanes_of(site))
    for lane in lanes:
        group = new_group(lane.ranks, lane.label)
        groups |= {link: group for link in lane.links if rank in link[:2]}
    waves = in_waves([link for lane in lanes for link in lane.links])
    return Links({link: groups[link] for wave in waves for link in wave if link in groups})
