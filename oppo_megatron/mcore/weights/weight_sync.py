"""Moves trained weights to the layout of decoding or scoring; with equal layouts the models share parameters.

megatron-core's resharding 0.16.1 plans over the world (`_RoleWorld`), supports one module per rank (`_Weights`), may fetch a
rank's own weights from others (`_nearest_replica`), and stages a whole model at once (`_rounds`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.resharding import execution, planner, utils
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.utils import ParameterMetadata, ReshardPlan, TransferOp
from torch import Tensor
from torch.nn import Parameter

from oppo_megatron.mcore.lora import is_adapter
from oppo_megatron.mcore.model import RoleModel

ROUND_BYTES = 64 << 20
"""Bytes staged per round and pair of ranks; a larger piece is its own round."""


@dataclass(frozen=True)
class MoveReport:
    """One move; `bytes_moved` between ranks, summed over the role."""

    bytes_moved: int
    seconds: float


class Reallocation:
    """Moves weights from trained chunks to the serving model, on the same ranks and of one dtype.

    Every rank of the role makes it and calls each `move`.
    """

    def __init__(self, training: Sequence[RoleModel], serving: RoleModel, round_bytes: int = ROUND_BYTES):
        ours, theirs = serving.groups, training[0].groups
        assert sorted(ours.ranks) == sorted(theirs.ranks), (ours.ranks, theirs.ranks)
        self.shared = len(training) == 1 and (ours.ranks, ours.tp, ours.pp) == (theirs.ranks, theirs.tp, theirs.pp)
        if self.shared:
            share_parameters(training[0], serving)
            return
        self._source, self._target = _weights(training, serving=False), _weights([serving], serving=True)
        self._world, self._service = _RoleWorld(ours.all), GroupCopy(ours.all)
        plan = self._plan()
        self._rounds = list(_rounds(plan, self._source, self._target, round_bytes))
        self._bytes = self._bytes_between_ranks(plan)

    def move(self) -> MoveReport:
        """Copy the trained weights, bit for bit, into the serving model's storages."""
        if self.shared:
            return MoveReport(0, 0.0)
        began = time.perf_counter()
        with self._world.in_place_of_the_world():
            for part in self._rounds:
                execution.execute_reshard_plan(part, self._source, self._target, self._service)
        device = next(iter(self._target.named.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return MoveReport(self._bytes, time.perf_counter() - began)

    def _plan(self) -> ReshardPlan:
        dtypes = {p.dtype for weights in (self._source, self._target) for p in weights.named.values()}
        assert len(dtypes) == 1, f"weights of different dtypes cannot be carried bit for bit: {dtypes}"
        nearest = mock.patch.object(planner, "select_src_metadata_balanced", _nearest_replica)
        with self._world.in_place_of_the_world(), nearest:
            plan = planner.build_centralized_reshard_plan(self._source, self._target)
        filled: dict[str, int] = defaultdict(int)
        for op in plan.recv_ops:
            filled[op.param_name] += self._target.piece(op).numel()
        assert filled == {name: p.numel() for name, p in self._target.named.items()}, "the plan leaves a gap"
        return plan

    def _bytes_between_ranks(self, plan: ReshardPlan) -> int:
        me = self._world.get_rank()
        received = [0] * self._world.get_world_size()
        own = sum(self._target.piece(op).nbytes for op in plan.recv_ops if op.peer_rank != me)
        self._world.all_gather_object(received, own)
        return sum(received)


def share_parameters(training: RoleModel, serving: RoleModel) -> None:
    """Give `serving` the `Parameter` objects of `training`, which DDP and optimizers keep, except adapters it lacks."""
    trained = dict(training.named_parameters())
    for path, old in list(serving.named_parameters()):
        new, (owner, _, name) = trained.pop(path), path.rpartition(".")
        assert new.shape == old.shape and new.dtype == old.dtype, (path, old.shape, new.shape)
        setattr(serving.get_submodule(owner), name, new)
    lacking = sorted(name for name in trained if serving.adapters is not None or not is_adapter(name))
    assert not lacking, f"parameters that the serving model lacks: {lacking}"


class GroupCopy(CopyService):
    """Copies between a group's ranks, numbered in the group; copies of a pair match in order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._sends: list[tuple[Tensor, int]] = []
        self._receives: list[tuple[Tensor, int]] = []

    def submit_send(self, src_tensor: Tensor, dest_rank: int) -> None:
        self._sends.append((src_tensor, dest_rank))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int) -> None:
        self._receives.append((dest_tensor, src_rank))

    def run(self) -> None:
        me = self._group.rank()
        own = ([tensor for tensor, peer in copies if peer == me] for copies in (self._receives, self._sends))
        for target, source in zip(*own, strict=True):
            target.copy_(source)
        transfers = [*self._operations(dist.isend, self._sends), *self._operations(dist.irecv, self._receives)]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        self._sends.clear()
        self._receives.clear()

    def _operations(self, call: Any, copies: Iterable[tuple[Tensor, int]]) -> Iterator[dist.P2POp]:
        for tensor, peer in copies:
            if peer != self._group.rank():
                yield dist.P2POp(call, tensor, dist.get_global_rank(self._group, peer), self._group)


class _Weights:
    def __init__(self, model: RoleModel, named: dict[str, Parameter]):
        self.named, self.pg_collection = named, model.pg_collection

    def named_parameters(self, recurse: bool = True) -> Iterable[tuple[str, Parameter]]:
        return self.named.items()

    def named_modules(self) -> tuple[()]:
        """Empty: the planner would read layer numbers from them, which the names already have."""
        return ()

    def piece(self, op: TransferOp) -> Tensor:
        return self.named[op.param_name].data[op.my_slice]


def _weights(chunks: Sequence[RoleModel], *, serving: bool) -> _Weights:
    """Return the changing parameters; a last stage's copy of tied embeddings is filled from them, not sent."""
    named: dict[str, Parameter] = {}
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        tied = chunk.share_embeddings_and_output_weights and not chunk.pre_process
        for name, param in chunk.named_parameters():
            is_head = name == "output_layer.weight"
            if chunk.adapters is not None and not is_adapter(name) and not (is_head and chunk.head == "scalar"):
                continue  # frozen: both models have loaded it
            if is_head and tied:
                if not serving:
                    continue
                name = "embedding.word_embeddings.weight"
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(numbers[int(parts[2])])
            named[".".join(parts)] = param
    return _Weights(chunks[0], named)


def _rounds(plan: ReshardPlan, source: _Weights, target: _Weights, round_bytes: int) -> Iterator[ReshardPlan]:
    """Split the plan to stage at most `round_bytes` per pair of ranks, or one larger piece.

    Both ranks of a pair see its transfers in the same order.
    """
    sends, receives = _cut(plan.send_ops, source, round_bytes), _cut(plan.recv_ops, target, round_bytes)
    for send_ops, recv_ops in itertools.zip_longest(sends, receives):
        yield ReshardPlan(send_ops or [], recv_ops or [])


def _cut(ops: Iterable[TransferOp], weights: _Weights, limit: int) -> list[list[TransferOp]]:
    rounds: dict[int, list[TransferOp]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    staged: dict[int, int] = defaultdict(int)
    for op in ops:
        size, peer = weights.piece(op).nbytes, op.peer_rank
        if staged[peer] and staged[peer] + size > limit:
            last[peer], staged[peer] = last[peer] + 1, 0
        staged[peer] += size
        rounds[last[peer]].append(op)
    return [rounds[index] for index in range(len(rounds))]


def _nearest_replica(sources: Sequence[ParameterMetadata], target: ParameterMetadata, target_rank: int) -> ParameterMetadata:
    """Choose the sender of a parameter: the receiving rank itself, else each in turn (unlike resharding/utils.py:322)."""
    own = [source for source in sources if source.owner_rank == target_rank]
    return own[0] if own else sources[target_rank % len(sources)]


class _RoleWorld:
    """`torch.distributed` for resharding, with one group as the world.

    planner.py:261-337 and execution.py:59 would involve ranks with other models.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._numbers = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}

    @contextlib.contextmanager
    def in_place_of_the_world(self) -> Iterator[None]:
        with (
            mock.patch.object(planner, "dist", self),
            mock.patch.object(planner, "torch", SimpleNamespace(distributed=self)),
            mock.patch.object(utils, "dist", self),
            mock.patch.object(execution, "dist", self),
        ):
            yield

    def get_rank(self) -> int:
        return self._group.rank()

    def get_world_size(self) -> int:
        return self._group.size()

    def get_process_group_ranks(self, group: dist.ProcessGroup) -> list[int]:
        return [self._numbers[rank] for rank in dist.get_process_group_ranks(group)]

    def all_gather_object(self, objects: list[Any], own: Any) -> None:
        dist.all_gather_object(objects, own, group=self._group)

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        dist.broadcast_object_list(objects, dist.get_global_rank(self._group, src), group=self._group)

    def barrier(self) -> None:
        """Do nothing: a rank's own copies are complete, and numbers of rounds may differ."""
