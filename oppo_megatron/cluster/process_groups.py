"""Process groups with the run's timeout."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.errors import StallError


def new_group(ranks: Sequence[int], desc: str, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group; all ranks call it: with `use_local_synchronization`, members with unequal counts of groups wait forever."""
    return dist.new_group(
        list(ranks), timeout=world_timeout(), backend=backend, group_desc=desc, use_local_synchronization=len(ranks) == 1
    )


class SharedGroups:
    """Groups by label and ranks, made once, in one order on all ranks (torch numbers them); first each rank's group of itself."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._alone = new_group((dist.get_rank(),), "self")

    def get(self, label: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Make the group if it is new; return None on ranks outside of it."""
        belongs = dist.get_rank() in ranks
        if len(ranks) == 1:
            return self._alone if belongs else None
        if (label, ranks) not in self._made:
            self._made[label, ranks] = new_group(ranks, label)
        return self._made[label, ranks] if belongs else None


def connect_pairs(group: dist.ProcessGroup) -> None:
    """Connect the pairs of ranks in gloo's barriers and broadcasts (collective), because later the store may be gone."""
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def use_once(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Run a blocking collective over each group (None: the world), in order of creation."""
    for group in groups:
        if dist.get_world_size(group) == 1:
            continue
        if device.type == "cpu":
            connect_pairs(group or the_world())
        else:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def use_ring_once(group: dist.ProcessGroup, device: torch.device, over: Sequence[dist.ProcessGroup | None]) -> None:
    """Make the communicators of a ring's neighbours in one order, `over` each of these groups (None: the world)."""
    rank = dist.get_rank()
    for first, second in ring_pairs(dist.get_process_group_ranks(group)):
        for each in over:
            number = torch.zeros(1, device=device)
            if rank == first:
                dist.send(number, second, each)
            elif rank == second:
                dist.recv(number, first, each)


def ring_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring pairs, every second first: those share no rank."""
    if len(ranks) == 2:
        return [(ranks[0], ranks[1])]
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    return pairs[::2] + pairs[1::2]


def the_world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the world is open before its groups are made"
    return world


def world_timeout() -> timedelta:
    timeout: timedelta = the_world()._get_backend(torch.device("cpu")).options._timeout
    return timeout


def gather_ragged(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Vectors [any length] of all ranks, of one dtype, on the CPU."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()]), group=group)
    sizes = [int(length) for length in lengths]
    padded = mine.new_zeros(max(1, *sizes))
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [vector[:size] for vector, size in zip(found, sizes, strict=True)]


def gather_figures(mine: Mapping[str, float], group: dist.ProcessGroup) -> list[dict[str, float]]:
    text = torch.frombuffer(bytearray(json.dumps(dict(mine)).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in gather_ragged(text, group)]


def is_lost_peer(error: RuntimeError) -> bool:
    """True for a back end's error (gloo's has no class)."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("/gloo/", "NCCL"))


def first_clause(error: Exception) -> str:
    clause = re.split(r"\. |\n", str(error))[0]
    return re.sub(r"^\[\S+\]\s*", "", clause).rstrip(".") or "no answer"


def stalled(rank: int, what: str, error: RuntimeError, timeout_s: float, waited_s: float | None = None) -> StallError:
    waited = "" if waited_s is None else f" for {waited_s:.1f} s"
    return StallError(
        f"rank {rank} waited{waited} in vain for `{what}` ({first_clause(error)}). The peer has died or hangs: see its own "
        f"message; runtime.timeout_s is {timeout_s:g}."
    )


@contextlib.contextmanager
def waiting_for(what: str, activity: Activity | None = None, *, waits: bool = True) -> Iterator[None]:
    """Section that waits for peers (`waits`: only waits). Raises StallError."""
    noted = contextlib.nullcontext() if activity is None else activity.doing(what, waits=waits)
    try:
        with noted:
            yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise stalled(dist.get_rank(), what, error, world_timeout().total_seconds()) from error
