"""Process groups with the run's deadline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int], desc: str, backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` with the timeout of the default group (`runtime.timeout_s`), and its back ends if no other is named.

    torch itself gives a new group 30 minutes (10 on NCCL), whatever the default group has.  A call of all ranks of the
    world, like torch's, which for those outside the group makes and sends nothing; for a group of one rank that one's alone.

    Members alone cannot make a group of several: with `use_local_synchronization` torch (at least up to 2.13) puts the number
    of groups that a rank has into the group's name, so members that have different numbers wait for each other in vain.
    """
    return dist.new_group(
        list(ranks), timeout=world_timeout(), backend=backend, group_desc=desc, use_local_synchronization=len(ranks) == 1
    )


class SharedGroups:
    """Groups of which each is made once, however many ask for it by its label and ranks.

    Every rank of the world makes these objects, and asks for the same groups in the same order.  It begins with a group of its
    own alone, so that all ranks have made equally many calls at each group of several: torch names groups by their number.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._alone = new_group((dist.get_rank(),), "self")

    def get(self, label: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group; None on a rank that does not belong to it."""
        belongs = dist.get_rank() in ranks
        if len(ranks) == 1:
            return self._alone if belongs else None
        if (label, ranks) not in self._made:
            self._made[label, ranks] = new_group(ranks, label)
        return self._made[label, ranks] if belongs else None


def connect_pairs(group: dist.ProcessGroup) -> None:
    """Connect, on gloo, the pairs that all sums, broadcasts and gathers on all ranks send between; all members make the call.

    gloo is to connect two ranks in their first message (`cluster/world.py`).  It asks the store where the other one listens,
    which may be gone when a run ends, and holds either end until the other has come.  Its barrier is between ranks whose
    numbers in the group differ by a power of 2, up or down.  So is a broadcast, from whatever rank; a ring goes by 1.
    """
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def use_once(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """One collective over each group (None: the world's), but for groups of one rank.

    NCCL makes a group's communicator in its first collective, and holds the host until all members have come; gloo does so
    with pairs.  So each rank gives its groups in the order in which all ranks have made them: whoever waits, waits at a later
    group than some rank that can go on.
    """
    for group in groups:
        if dist.get_world_size(group) == 1:
            continue
        if device.type == "cpu":
            connect_pairs(group or the_world())
        else:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def use_ring_once(group: dist.ProcessGroup, device: torch.device) -> None:
    """Send one number between all neighbours in the ring of a group's ranks, of which there are several.

    So that the communicators of megatron-core's interleaved pipeline are made: of each two neighbours, and where the ring has
    two ranks only, of these in the world's group, too, over which megatron-core sends one way.  Either end of a first message
    waits, so each rank goes through its pairs in the order that all have.
    """
    rank = dist.get_rank()
    for first, second in ring_pairs(dist.get_process_group_ranks(group)):
        for over in (group, None) if group.size() == 2 else (group,):
            number = torch.zeros(1, device=device)
            if rank == first:
                dist.send(number, second, over)
            elif rank == second:
                dist.recv(number, first, over)


def ring_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours in the ring of `ranks`, each pair once: every second pair first, as those have no rank in common."""
    if len(ranks) == 2:
        return [(ranks[0], ranks[1])]
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    return pairs[::2] + pairs[1::2]


def the_world() -> dist.ProcessGroup:
    """The default group, of all ranks."""
    world = dist.group.WORLD
    assert world is not None, "the world is open before its groups are made"
    return world


def world_timeout() -> timedelta:
    """How long the world's default group waits (`runtime.timeout_s`)."""
    timeout: timedelta = the_world()._get_backend(torch.device("cpu")).options._timeout
    return timeout
