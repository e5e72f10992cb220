"""One process group for each directed link that a schedule may send over.

Two streams of messages between the same ranks (decode and prefill, say) must not wait for one another, so each has its
own group: (source, destination, role, payload).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site

Link = tuple[int, int, str, Payload]


@dataclass(frozen=True)
class Links:
    """This rank's links."""

    groups: dict[Link, dist.ProcessGroup]

    def of(self, action: Action) -> dist.ProcessGroup:
        """The group that a send or recv goes over."""
        assert action.peer is not None and action.payload is not None
        ends = (action.rank, action.peer) if action.op is Op.SEND else (action.peer, action.rank)
        return self.groups[ends[0], ends[1], action.role, action.payload]


def build_links(site: Site, device: torch.device | None = None) -> Links:
    """Create the groups of all links, and open those between CUDA devices.  Every rank of the world makes the call.

    NCCL connects two ranks in their first message, and both hosts wait there for each other: within a round, in which ranks
    send before they receive, for good.  Here all ranks go through the links in the same order.
    """
    rank, groups = dist.get_rank(), {}
    for link in _links(site):
        source, destination, role, payload = link
        group = new_group([source, destination], f"{role}.{payload.value}.{source}-{destination}")
        if rank in (source, destination):
            groups[link] = group
    links = Links(groups)
    if device is not None and device.type == "cuda":
        open_links(links, device)
    return links


def open_links(links: Links, device: torch.device) -> None:
    """A message over each link of this rank.  All ranks make the call."""
    rank = dist.get_rank()
    for (source, destination, _, _), group in links.groups.items():
        number = torch.zeros(1, device=device)
        work = (
            dist.isend(number, destination, group=group) if rank == source else dist.irecv(number, source, group=group)
        )
        assert work is not None, "a rank's links are those that it is an end of"
        work.wait()


def _links(site: Site) -> Iterator[Link]:
    for role, placement in site.placements.items():
        for replica in range(placement.dp):
            for shard in range(placement.tp):
                stages = [placement.rank(replica, stage, shard) for stage in range(placement.pp)]
                for source, destination in zip(stages, stages[1:], strict=False):
                    yield source, destination, role, Payload.HIDDEN
                if role == "actor":
                    for destination in stages[:-1]:
                        yield stages[-1], destination, role, Payload.TOKENS
    for listener in site.listeners:
        yield site.source, listener, "actor", Payload.CHUNK
