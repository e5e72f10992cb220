"""Calls of torch.distributed between ranks with fake tensors: all ranks of a group must make the same one, or each gets an error.
The first message of two ranks over a group makes each wait for the other, as NCCL does; within the run's work that is a fault."""

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.rehearsal.channels import Channels, Done
from tests.rehearsal.watch import Watch, here

PATIENCE_S = 120.0
LOOK_S = 0.25
"""So often a rank that waits looks whether anybody is left to give it what it waits for."""
WORKS = "works"
"""A key that is set: a rank that waits for this one does not wait."""
BY_NCCL = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool,
)  # fmt: skip
PICKLES = ("train/saving/", "mcore/weights/checkpoint.py")
"""Where objects go between ranks in a run's work: while a checkpoint is written."""


class Mismatch(RuntimeError):
    """Ranks do not make the same call."""


class Peers:
    def join(self, watch: Watch, store: dist.Store, rank: int, size: int) -> None:
        self.watch, self.store, self.rank, self.size, self.channels = watch, store, rank, size, Channels(watch)
        store.set(WORKS, "")
        self.groups: dict[Any, tuple[str, list[int]]] = {}
        self._world = "world", list(range(size))
        self._made = 0
        self.opened: set[str] = set()  # groups, and pairs in them, whose communicator is made
        self._calls: Counter[str] = Counter()
        self.about: Any = None  # what a message is about, beside its tag: NCCL gives whatever comes next
        self.messages: Counter[str] = Counter()  # by channel: sent, less those that were taken

    def of(self, group: Any) -> tuple[str, list[int]]:
        if group is None or group is dist.group.WORLD:
            return self._world
        if group not in self.groups:
            raise Mismatch(f"rank {self.rank} makes a call of a group that it is no member of")
        return self.groups[group]

    def place(self, group: Any, rank: int | None, in_group: int | None) -> int:
        return (in_group or 0) if rank is None else self.of(group)[1].index(rank)

    def remember(self, group: Any, ranks: Sequence[int] | None) -> Any:
        """A group was made, by a call of all ranks in the same order."""
        self._made += 1
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self.groups[group] = f"group {self._made}", list(ranks or self._world[1])
        return group

    def exchange(self, group: Any, mine: Any) -> list[Any]:
        name, ranks = self.of(group)
        self._calls[name] += 1
        key = f"{name}/{self._calls[name]}"
        self.store.set(f"{key}/{self.rank}", pickle.dumps(mine))
        return [mine if rank == self.rank else self._get(f"{key}/{rank}", mine, rank) for rank in ranks]

    def _get(self, key: str, waits_in: Any, rank: int) -> Any:
        if not self._comes(key):
            raise Mismatch(f"rank {self.rank} waits in vain for rank {rank} in {waits_in!r:.200}")
        return pickle.loads(self.store.get(key))

    def _comes(self, key: str) -> bool:
        """Wait for a key.  False once nobody is left to set it: the others have ended, or wait for keys that are not set, too."""
        until, before, looked = time.monotonic() + PATIENCE_S, None, False
        while True:
            try:
                self.store.wait([key], timedelta(seconds=LOOK_S))
            except RuntimeError:
                self._tell(key)
                looked, stand = True, self._stand()
                if (stand and stand == before) or time.monotonic() > until:
                    return False
                before = stand
            else:
                if looked:
                    self._tell(WORKS)
                return True

    def _tell(self, waits_for: str) -> None:
        self.store.set(f"waits of {self.rank}", waits_for)

    def _stand(self) -> list[bytes] | None:
        """The wait of each rank, if all wait for what is not there."""
        waits = [f"waits of {rank}" for rank in range(self.size)]
        if not self.store.check(waits):
            return None
        keys = [self.store.get(each) for each in waits]
        return None if any(self.store.check([each.decode()]) for each in keys) else keys

    def leave(self) -> None:
        self._tell("nothing")

    def collective(self, what: str, group: Any, tensors: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """Known numbers of the tensors that each rank gives; raises Mismatch where the calls differ."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                if tensor.dtype not in BY_NCCL or not tensor.is_contiguous():
                    self.watch.fault(f"NCCL takes no {tensor.dtype} tensor of strides {tensor.stride()}")
        name, ranks = self.of(group)
        if tensors[0].device.type == "cuda" and name not in self.opened and len(ranks) > 1:
            self.opened.add(name)
            self._opens(f"the communicator of ranks {ranks}")
        told = what, [(str(x.dtype), x.numel(), x.device.type) for x in tensors]
        found = self.exchange(group, (told, [self._numbers(x) for x in tensors]))
        if any(each[0] != told for each in found):
            raise Mismatch(f"calls differ: {[each[0] for each in found]}")
        return [each[1] for each in found]

    def _numbers(self, tensor: Tensor) -> Tensor | None:
        known = self.watch.known(tensor)
        return None if known is None else known.clone()

    def put(self, tensor: Tensor, numbers: Tensor | None) -> None:
        if isinstance(tensor, FakeTensor):
            whole = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
            self.watch.learn(tensor, numbers if whole else None)
        elif numbers is not None:
            tensor.copy_(numbers.view(tensor.shape))

    def over(self, group: Any, reads: Sequence[Tensor], writes: Sequence[Tensor], async_op: bool) -> Done | None:
        return self.channels.over(self.channels.begin(self.of(group)[0], reads, writes), async_op)

    def pickles(self) -> None:
        """Objects go by two collectives, for which the host waits, and take time that grows with the ranks."""
        if self.watch.phase != "start" and not here()[0].startswith(PICKLES):
            self.watch.fault(f"pickled objects go between ranks in the run's work ({self.watch.phase})")

    def _opens(self, what: str) -> None:
        """NCCL makes a communicator now: the host waits for other ranks, and the device's memory gets less."""
        if self.watch.phase != "start":
            self.watch.fault(f"{what} is made in the run's work ({self.watch.phase})")

    def _meet(self, peer: int, group: Any) -> None:
        """The first message of two ranks over a group, either way: each end waits for the other."""
        name, (low, high) = self.of(group)[0], sorted((self.rank, peer))
        pair = f"{name}/{low}-{high}"
        if pair in self.opened:
            return
        self.opened.add(pair)
        self._opens(f"the communicator of ranks {low} and {high}")
        self.store.set(f"{pair}/met/{self.rank}", pickle.dumps(True))
        self._get(f"{pair}/met/{peer}", f"the first message with rank {peer} over {name}", peer)

    def send(self, tensor: Tensor, to: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        """`alone`: not in a batch, which goes over the group's own communicator."""
        if alone and tensor.device.type == "cuda":
            self._meet(to, group)
        key = self._message(group, self.rank, to)
        if isinstance(tensor, FakeTensor) and not tensor.is_contiguous():
            self.watch.fault("a message is not contiguous")
        told = str(tensor.dtype), tensor.numel(), tensor.device.type
        self.store.set(key, pickle.dumps((told, (tag, self.about), self._numbers(tensor))))
        return self.channels.begin(self._channel(group, to, alone), [tensor], [])

    def receive(self, tensor: Tensor, source: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        if alone and tensor.device.type == "cuda":
            self._meet(source, group)
        key, about = self._message(group, source, self.rank), (tag, self.about)

        def finish() -> None:
            told, meant, numbers = self._get(key, f"a message from rank {source}", source)
            wanted = str(tensor.dtype), tensor.numel(), tensor.device.type
            if told != wanted:
                raise Mismatch(f"rank {source} sends {told}, rank {self.rank} receives {wanted}")
            if meant != about:
                self.watch.fault(f"rank {source} sends what is about {meant}, rank {self.rank} takes it for {about}")
            self.put(tensor, numbers)

        return self.channels.begin(self._channel(group, source, alone), [], [tensor], finish)

    def _channel(self, group: Any, peer: int, alone: bool) -> str:
        return f"{self.of(group)[0]}/{peer}" if alone else self.of(group)[0]

    def _message(self, group: Any, source: int, target: int) -> str:
        name = f"{self.of(group)[0]}/{source}-{target}"
        self._calls[name] += 1
        self.messages[name] += 1 if source == self.rank else -1
        return f"{name}/{self._calls[name]}"


class Alone(Peers):
    """One rank without the others: they make the same calls; what comes from one has a type and a size, and no numbers."""

    def stand(self, watch: Watch, rank: int, size: int) -> None:
        self.join(watch, dist.HashStore(), rank, size)

    def exchange(self, group: Any, mine: Any) -> list[Any]:
        return [mine for _ in self.of(group)[1]]

    def send(self, tensor: Tensor, to: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        return self.channels.begin("messages", [tensor], [])

    def receive(self, tensor: Tensor, source: int, group: Any, *, alone: bool, tag: int = 0) -> Done:
        return self.channels.begin("messages", [], [tensor], lambda: self.put(tensor, None))


def _reduced(op: Any, all_numbers: list[Tensor | None]) -> Tensor | None:
    if any(numbers is None for numbers in all_numbers):
        return None
    stacked = torch.stack([numbers for numbers in all_numbers if numbers is not None])
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    if op == dist.ReduceOp.MIN:
        return stacked.amin(0)
    return stacked.sum(0).to(stacked.dtype)


def install(peers: Peers) -> None:
    for name, stand_in in {**_collectives(peers), **_messages(peers), **_objects(peers)}.items():
        for module in (dist, c10d):
            setattr(module, name, stand_in)


def _collectives(peers: Peers) -> dict[str, Any]:
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        found = peers.collective(f"all_reduce {op}", group, [tensor])
        peers.put(tensor, _reduced(op, [numbers[0] for numbers in found]))
        return peers.over(group, [tensor], [tensor], async_op)

    def broadcast(
        tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Any:
        source = peers.place(group, src, group_src)
        found = peers.collective(f"broadcast from {source}", group, [tensor])
        peers.put(tensor, found[source][0])
        return peers.over(group, [tensor], [tensor], async_op)

    def all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        found = peers.collective("all_gather", group, [tensor])
        for target, numbers in zip(tensors, found, strict=True):
            assert target.dtype == tensor.dtype and target.device == tensor.device, (target.dtype, tensor.dtype)
            peers.put(target, numbers[0])
        return peers.over(group, [tensor], tensors, async_op)

    def all_gather_into_tensor(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        assert output.numel() == tensor.numel() * len(peers.of(group)[1]) and output.dtype == tensor.dtype
        found = [numbers[0] for numbers in peers.collective("all_gather_into_tensor", group, [tensor])]
        known = not any(numbers is None for numbers in found)
        peers.put(output, torch.cat([x.flatten() for x in found if x is not None]).view(output.shape) if known else None)
        return peers.over(group, [tensor], [output], async_op)

    def reduce_scatter_tensor(
        output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        assert output.numel() * len(peers.of(group)[1]) == tensor.numel() and output.dtype == tensor.dtype
        peers.collective(f"reduce_scatter {op}", group, [tensor])
        peers.put(output, None)
        return peers.over(group, [tensor], [output], async_op)

    def all_to_all_single(
        output: Tensor, tensor: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        peers.collective("all_to_all_single", group, [tensor[:0]])
        ranks = peers.of(group)[1]
        taken, given = (
            [len(x) // len(ranks)] * len(ranks) if sizes is None else sizes
            for x, sizes in ((output, output_split_sizes), (tensor, input_split_sizes))
        )
        own = peers.place(group, peers.rank, None)
        if [each[own] for each in peers.exchange(group, given)] != taken or sum(given) != len(tensor):
            raise Mismatch(f"rank {peers.rank} gives {given} of {len(tensor)} rows, and takes {taken}")
        peers.put(output, None)
        return peers.over(group, [tensor], [output], async_op)

    def gather(
        tensor: Tensor, tensors: Any = None, dst: int | None = None, group: Any = None, async_op: bool = False,
        group_dst: int | None = None,
    ) -> Any:  # fmt: skip
        found = peers.collective("gather", group, [tensor])
        for target, numbers in zip(tensors or (), found, strict=False):
            peers.put(target, numbers[0])
        return peers.over(group, [tensor], tensors or (), async_op)

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        peers.exchange(group, "barrier")
        return peers.over(group, [], [], async_op)

    def together(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return peers.channels.together(async_ops)

    return {
        "all_reduce": all_reduce, "broadcast": broadcast, "all_gather": all_gather, "barrier": barrier, "gather": gather,
        "all_gather_into_tensor": all_gather_into_tensor, "reduce_scatter_tensor": reduce_scatter_tensor,
        "all_to_all_single": all_to_all_single,
        "_all_gather_base": all_gather_into_tensor, "_reduce_scatter_base": reduce_scatter_tensor,
        "_coalescing_manager": together,
    }  # fmt: skip


def _messages(peers: Peers) -> dict[str, Any]:
    def isend(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Done:
        assert dst is not None
        return peers.send(tensor, dst, group, alone=True, tag=tag)

    def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Done:
        assert src is not None
        return peers.receive(tensor, src, group, alone=True, tag=tag)

    def batch_isend_irecv(operations: list[Any]) -> list[Done]:
        done = []
        for each in operations:
            if each.tensor.device.type == "cuda" and peers.of(each.group)[0] not in peers.opened:
                peers.watch.fault("batched messages are the first call of a group")
            carry = peers.send if each.op is isend else peers.receive
            done.append(carry(each.tensor, each.peer, each.group, alone=False))
        return done

    return {
        "isend": isend, "irecv": irecv, "batch_isend_irecv": batch_isend_irecv,
        "send": lambda *a, **k: isend(*a, **k).wait(), "recv": lambda *a, **k: irecv(*a, **k).wait(),
    }  # fmt: skip


def _objects(peers: Peers) -> dict[str, Any]:
    new_group = dist.new_group

    def made(ranks: Sequence[int] | None = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        return peers.remember(new_group(ranks, timeout=timeout, **more), ranks)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        peers.pickles()
        object_list[:] = peers.exchange(group, obj)

    def broadcast_object_list(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        peers.pickles()
        object_list[:] = peers.exchange(group, list(object_list))[peers.place(group, src, group_src)]

    def gather_object(
        obj: Any, object_gather_list: Any = None, dst: int | None = None, group: Any = None, group_dst: Any = None
    ) -> None:
        peers.pickles()
        found = peers.exchange(group, obj)
        if object_gather_list is not None:
            object_gather_list[:] = found

    def scatter_object_list(
        scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, src: int | None = None,
        group: Any = None, group_src: Any = None,
    ) -> None:  # fmt: skip
        peers.pickles()
        given = peers.exchange(group, scatter_object_input_list)[peers.place(group, src, group_src)]
        scatter_object_output_list[0] = given[peers.place(group, peers.rank, None)]

    return {
        "new_group": made, "all_gather_object": all_gather_object, "broadcast_object_list": broadcast_object_list,
        "gather_object": gather_object, "scatter_object_list": scatter_object_list,
    }  # fmt: skip
