"""Bookkeeping of a stage's key/value cache, and dense storage: a slot of `max_length` positions per sequence.

A sequence:  open -> [fork] -> (begin .. commit)* -> [truncate -> (begin .. commit)*]* -> close
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.errors import CapacityError, CheckpointError
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.kv.cached_plan import CallPlan, Places, StepPlan, StepRows

REACH = 256  # if only the device knows positions, a decode step attends to this times a power of two
COPIED_NUMBERS = 2**25  # most numbers of a dense cache copied at once: 64 MiB in bfloat16


class SequenceCache(ABC):
    def __init__(
        self, shape: Callable[[int], tuple[int, ...]], *, num_layers: int, num_slots: int, max_length: int,
        rope: tuple[Tensor, ...], dtype: torch.dtype, device: torch.device, budget_bytes: int | None = None,
    ):  # fmt: skip
        """`shape(slots)`: shape of a layer's keys.  Raises CapacityError if no slot fits the budget."""
        slot_bytes = 2 * num_layers * prod(shape(1)) * dtype.itemsize
        self.num_slots = num_slots if budget_bytes is None else min(num_slots, budget_bytes // slot_bytes)
        if self.num_slots < 1:
            raise CapacityError(
                f"a KV cache of {budget_bytes:,} bytes cannot hold one sequence of {max_length} tokens, which takes "
                f"{slot_bytes:,} bytes on this rank. Raise runtime.kv_cache_mb to at least {-(-slot_bytes // 2**20)}, "
                "or lower data.max_prompt_tokens or rollout.max_response_tokens."
            )
        self.max_length, self.rope, self.dtype, self.device = max_length, rope, dtype, device
        self.whole = torch.zeros(2 * num_layers, *shape(self.num_slots), dtype=dtype, device=device)
        self.k, self.v = self.whole[:num_layers].unbind(0), self.whole[num_layers:].unbind(0)
        self._slots: dict[int, int] = {}
        self._ids: list[int] = []
        self._lengths: list[int] = []

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._slots

    @property
    def num_bytes(self) -> int:
        return self.whole.nbytes

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._slots)

    @property
    def seq_ids(self) -> list[int]:
        """Open sequences in slot order."""
        return list(self._ids)

    def slot(self, seq_id: int) -> int:
        return self._slots[seq_id]

    def length(self, seq_id: int) -> int:
        return self._lengths[self._slots[seq_id]]

    def open(self, seq_id: int) -> None:
        assert seq_id not in self._slots, f"sequence {seq_id} is already open"
        if not self.num_free:
            raise CapacityError(f"sequence {seq_id} finds no free slot of {self.num_slots}; admission must wait for one.")
        self._slots[seq_id] = len(self._ids)
        self._ids.append(seq_id)
        self._lengths.append(0)

    def close(self, seq_id: int) -> None:
        """Free the slot; the last sequence moves into the gap."""
        slot, last = self._slots[seq_id], len(self._ids) - 1
        self._shorten(slot, 0)
        if slot != last:  # first: if it fails, the last sequence is still in its slot
            self._move(last, slot, self._lengths[last])
        del self._slots[seq_id]
        mover, length = self._ids.pop(), self._lengths.pop()
        if slot != last:
            self._slots[mover], self._ids[slot], self._lengths[slot] = slot, mover, length

    def exchange(self, one: int, other: int) -> None:
        a, b = self._slots[one], self._slots[other]
        if a == b:
            return
        self._swap(a, b, max(self._lengths[a], self._lengths[b]))
        self._slots[one], self._slots[other] = b, a
        self._ids[a], self._ids[b] = other, one
        self._lengths[a], self._lengths[b] = self._lengths[b], self._lengths[a]

    def truncate(self, seq_id: int, length: int) -> None:
        assert 0 <= length <= self.length(seq_id), (seq_id, length, self.length(seq_id))
        slot = self._slots[seq_id]
        self._shorten(slot, length)
        self._lengths[slot] = length

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens to empty `targets`."""
        assert length <= self.length(source), f"sequence {source} has {self.length(source)} tokens to fork, not {length}"
        slots = [self._slots[target] for target in targets]
        for target, slot in zip(targets, slots, strict=True):
            assert self._lengths[slot] == 0, f"sequence {target} has {self._lengths[slot]} tokens and cannot be a fork"
        self._share(self._slots[source], slots, length)
        for slot in slots:
            self._lengths[slot] = length

    def begin(self, seq_ids: Sequence[int], lens: Sequence[int]) -> CallPlan:
        for seq_id, new in zip(seq_ids, lens, strict=True):
            self.reserve(seq_id, new)
        slots = [self._slots[i] for i in seq_ids]
        return CallPlan(self, slots, [self._lengths[s] for s in slots], list(lens))

    def commit(self, plan: CallPlan) -> None:
        for slot, start, new in zip(plan.slots, plan.past, plan.lens, strict=True):
            self._lengths[slot] = start + new

    def reserve(self, seq_id: int, new: int) -> None:
        """Make room for `new` more tokens.  Raises CapacityError beyond `max_length`."""
        slot = self._slots[seq_id]
        start = self._lengths[slot]
        if start + new > self.max_length:
            raise CapacityError(f"sequence {seq_id}: {start} cached + {new} new tokens exceed {self.max_length} positions")
        self._extend(slot, start + new)

    def advance(self, seq_id: int, new: int) -> None:
        self._lengths[self._slots[seq_id]] += new

    def stored(self, seq_id: int) -> Tensor:
        """Return keys and values, [2 * layers, length, G, D]."""
        return self._read(self._slots[seq_id], self.length(seq_id))

    def restore(self, seq_id: int, stored: Tensor) -> None:
        """Open a sequence with keys and values from `stored`.  Raises CheckpointError if they are another model's."""
        self.open(seq_id)
        slot = self._slots[seq_id]
        try:
            ours = self._read(slot, 0)
            fits = stored.dim() == 4 and stored.shape[0] == ours.shape[0] and stored.shape[2:] == ours.shape[2:]
            if not fits or stored.dtype != ours.dtype:
                raise CheckpointError(
                    f"the cache of sequence {seq_id} is {stored.dtype} {list(stored.shape)}, this model's is {ours.dtype} "
                    f"{list(ours.shape)} with a length in the second place; resume in another layout"
                )
            self.reserve(seq_id, stored.shape[1])
            self._write(slot, stored.to(self.device))
            self._lengths[slot] = stored.shape[1]
        except BaseException:
            self.close(seq_id)
            raise

    def bucket(self, longest: int) -> int:
        return min(REACH << ((longest - 1) // REACH).bit_length(), self.max_length)

    @abstractmethod
    def step_rows(self) -> StepRows: ...

    @abstractmethod
    def places(self, plan: CallPlan) -> Places: ...

    @abstractmethod
    def _move(self, source: int, target: int, length: int) -> None:
        """Move to an empty slot."""

    @abstractmethod
    def _swap(self, one: int, other: int, length: int) -> None: ...

    @abstractmethod
    def _share(self, source: int, targets: list[int], length: int) -> None: ...

    @abstractmethod
    def _extend(self, slot: int, length: int) -> None: ...

    @abstractmethod
    def _read(self, slot: int, length: int) -> Tensor:
        """Return [2 * layers, length, G, D]."""

    @abstractmethod
    def _write(self, slot: int, stored: Tensor) -> None: ...

    @abstractmethod
    def _shorten(self, slot: int, length: int) -> None: ...


class KVCache(SequenceCache):
    """Storage k, v: per layer [M, G, L, D]; whole: [2 * layers, M, G, L, D]."""

    def __init__(self, *, num_kv_heads: int, head_dim: int, max_length: int, **sizes: Any):
        super().__init__(lambda num_slots: (num_slots, num_kv_heads, max_length, head_dim), max_length=max_length, **sizes)

    def step_rows(self) -> StepRows:
        return _DenseRows(self)

    def places(self, plan: CallPlan) -> DensePlaces:
        lo, hi = min(plan.slots), max(plan.slots) + 1
        span = slice(lo, hi) if plan.slots == list(range(lo, hi)) else plan.slots_S
        return DensePlaces(self, plan.slots_S if plan.decode else plan.slots_S[plan.row_T], plan.pos_T, span)

    def _move(self, source: int, target: int, length: int) -> None:
        self.whole[:, target, :, :length] = self.whole[:, source, :, :length]

    def _swap(self, one: int, other: int, length: int) -> None:
        for stores in self._few_layers(1, length):
            held = stores[:, one, :, :length].clone()
            stores[:, one, :, :length] = stores[:, other, :, :length]
            stores[:, other, :, :length] = held

    def _few_layers(self, sequences: int, length: int) -> Sequence[Tensor]:
        """Split the layers so that a copy of some sequences stays small."""
        return self.whole.split(max(1, COPIED_NUMBERS // max(1, sequences * self.whole[0, 0, :, :length].numel())))

    def _share(self, source: int, targets: list[int], length: int) -> None:
        slot_S = on_device(targets, self.device)
        for stores in self._few_layers(len(targets), length):
            stores[:, slot_S, :, :length] = stores[:, source, None, :, :length].clone()

    def _extend(self, slot: int, length: int) -> None:
        pass  # a slot has all positions

    def _shorten(self, slot: int, length: int) -> None:
        pass

    def _read(self, slot: int, length: int) -> Tensor:
        return self.whole[:, slot, :, :length].transpose(1, 2).contiguous()

    def _write(self, slot: int, stored: Tensor) -> None:
        self.whole[:, slot, :, : stored.shape[1]] = stored.transpose(1, 2)


class DensePlaces:
    """New tokens go to slots `slot_T`, positions `pos_T`; `span`: the call's slots, a slice if they are neighbours."""

    def __init__(self, cache: KVCache, slot_T: Tensor, pos_T: Tensor, span: slice | Tensor):
        self._cache, self._slot_T, self._pos_T, self.span = cache, slot_T, pos_T, span

    def attend(self, *_: Any) -> None:
        return None

    turn_and_attend = attend

    def extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        views = []
        for store, new_TGD in ((self._cache.k[layer], k_TGD), (self._cache.v[layer], v_TGD)):
            store[self._slot_T, :, self._pos_T] = new_TGD
            if isinstance(self.span, slice):
                views.append(store[self.span, :, :longest])
            else:
                views.append(store[:, :, :longest].index_select(0, self.span))
        return views[0], views[1]


class _DenseRows(StepRows):
    def __init__(self, cache: KVCache):
        self._cache = cache
        self._slot_M = torch.zeros(cache.num_slots, dtype=torch.int64, device=cache.device)
        self._first = 0

    def load(self, slots: Sequence[int]) -> None:
        self._first = min(slots)
        self._slot_M[: len(slots)] = on_device(slots, self._cache.device)

    @property
    def key(self) -> Hashable:
        return self._first

    def reach(self, longest: int) -> int:
        return self._cache.bucket(longest)

    def plan(self, position_B: Tensor, reach: int, idle_B: Tensor) -> StepPlan:
        num_rows = len(position_B)
        places = DensePlaces(self._cache, self._slot_M[:num_rows], position_B, slice(self._first, self._first + num_rows))
        return StepPlan(self._cache, places, position_B, reach)
