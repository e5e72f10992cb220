"""Process groups with the run's deadline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


def new_group(ranks: Sequence[int], desc: str, backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` with the default group's timeout (`runtime.timeout_s`), and its back ends if no other is given.

    torch gives a new group 30 minutes (10 on NCCL).  All ranks of the world make the call; it makes and sends nothing outside
    the group.  A group of one rank is made by that rank alone.

    Members alone cannot make a group of several: with `use_local_synchronization` torch (at least up to 2.13) puts the rank's
    number of groups into the group's name, so members with different numbers wait for each other forever.
    """
    return dist.new_group(
        list(ranks), timeout=world_timeout(), backend=backend, group_desc=desc, use_local_synchronization=len(ranks) == 1
    )


class SharedGroups:
    """Groups by label and ranks, each made once.

    Every rank of the world makes these objects and gets the same groups in the same order.  It starts with a group of its own,
    so that all ranks have made the same number of calls at each group of several: torch names groups by their number.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._alone = new_group((dist.get_rank(),), "self")

    def get(self, label: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group; None on a rank outside of it."""
        belongs = dist.get_rank() in ranks
        if len(ranks) == 1:
            return self._alone if belongs else None
        if (label, ranks) not in self._made:
            self._made[label, ranks] = new_group(ranks, label)
        return self._made[label, ranks] if belongs else None


def connect_pairs(group: dist.ProcessGroup) -> None:
    """Connect, on gloo, the pairs that sums, broadcasts and gathers use; all members make the call.

    gloo connects two ranks in their first message (`cluster/world.py`).  It reads the other's address from the store, which
    may be gone when a run ends, and blocks both ends until the other has come.  Its barrier, like its broadcast from any rank,
    is between ranks whose numbers in the group differ by a power of 2; a ring is between neighbours.
    """
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def use_once(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """One collective over each group (None: the world's) of several ranks.

    NCCL makes a group's communicator in its first collective and blocks the host until all members have come; gloo does so
    with pairs.  So each rank gives its groups in the order in which all ranks made them: then some rank can always continue.
    """
    for group in groups:
        if dist.get_world_size(group) == 1:
            continue
        if device.type == "cpu":
            connect_pairs(group or the_world())
        else:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def use_ring_once(group: dist.ProcessGroup, device: torch.device) -> None:
    """Send one number between all neighbours in the ring of a group of several ranks.

    This makes the communicators of megatron-core's interleaved pipeline: of each two neighbours and, if the ring has two
    ranks, of these in the world's group, too, which megatron-core uses in one direction.  Both ends of a first message wait,
    so all ranks use the same order of pairs.
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
    """Neighbours in the ring of `ranks`, each pair once: every second pair first, because those share no rank."""
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
    """Timeout of the default group (`runtime.timeout_s`)."""
    timeout: timedelta = the_world()._get_backend(torch.device("cpu")).options._timeout
    return timeout


def gather_ragged(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Vectors of all ranks of the group, in the order of ranks, without pickling.  Two collectives: lengths, then padded vectors.

    `mine`: [any length], of one dtype on all ranks, on the CPU.
    """
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()]), group=group)
    sizes = [int(length) for length in lengths]
    longest = max(sizes)
    if not longest:
        return [mine.new_empty(0) for _ in sizes]
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [vector[:size] for vector, size in zip(found, sizes, strict=True)]


def gather_figures(mine: Mapping[str, float], group: dist.ProcessGroup) -> list[dict[str, float]]:
    """Named numbers of all ranks of the group, to the bit, sent as JSON; ranks may have different names."""
    text = torch.frombuffer(bytearray(json.dumps(dict(mine)).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in gather_ragged(text, group)]
