"""The dense key/value cache: a slot of `max_length` positions per sequence.

Decode steps over neighbouring slots read one slice, but changing slots and forking prompts copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.kv.cached_plan import CallPlan, StepPlan, StepRows
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache


class KVCache(SequenceCache):
    """Storage k, v: per layer [M, G, L, D].  Raises CapacityError if no sequence fits the budget."""

    def __init__(self, *, num_kv_heads: int, head_dim: int, max_length: int, **sizes: Any):
        super().__init__(lambda num_slots: (num_slots, num_kv_heads, max_length, head_dim), max_length=max_length, **sizes)

    def step_rows(self) -> StepRows:
        return _DenseRows(self)

    def _plan(self, slots: list[int], past: list[int], lens: list[int]) -> DensePlan:
        return DensePlan(self, slots, past, lens)

    def _move(self, source: int, target: int, length: int) -> None:
        for store in self.stores:
            store[target, :, :length] = store[source, :, :length]

    def _swap(self, one: int, other: int, length: int) -> None:
        for store in self.stores:
            held = store[one, :, :length].clone()
            store[one, :, :length] = store[other, :, :length]
            store[other, :, :length] = held

    def _share(self, source: int, targets: list[int], length: int) -> None:
        slot_S = on_device(targets, self.device)
        for store in self.stores:
            store[slot_S, :, :length] = store[source, :, :length].clone()

    def _extend(self, slot: int, length: int) -> None:
        """Nothing to do: a slot has all positions."""

    def _shorten(self, slot: int, length: int) -> None:
        """Nothing to do."""

    def _read(self, slot: int, length: int) -> Tensor:
        return torch.stack([store[slot, :, :length].transpose(0, 1) for store in self.stores])

    def _write(self, slot: int, stored: Tensor) -> None:
        for store, values_LGD in zip(self.stores, stored, strict=True):
            store[slot, :, : len(values_LGD)] = values_LGD.transpose(0, 1)


class DensePlan(CallPlan):
    def __init__(self, cache: KVCache, slots: list[int], past: list[int], lens: list[int]):
        super().__init__(cache, slots, past, lens)
        self.cache = cache
        lo, hi = min(slots), max(slots) + 1
        self.span = (lo, hi) if slots == list(range(lo, hi)) else None
        self._slot_T = self.slots_S if self.decode else self.slots_S[self.row_T]

    def _extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        views = []
        for store, new_TGD in ((self.cache.k[layer], k_TGD), (self.cache.v[layer], v_TGD)):
            store[self._slot_T, :, self.pos_T] = new_TGD
            if self.span is not None:
                views.append(store[self.span[0] : self.span[1], :, : self.longest])
            else:
                views.append(store[:, :, : self.longest].index_select(0, self.slots_S))
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

    def plan(self, position_B: Tensor, reach: int) -> StepPlan:
        return _DenseStep(self._cache, self._slot_M[: len(position_B)], self._first, position_B, reach)


class _DenseStep(StepPlan):
    def __init__(self, cache: KVCache, slot_B: Tensor, first: int, position_B: Tensor, reach: int):
        super().__init__(cache, position_B, reach)
        self._cache, self._slot_B, self._span = cache, slot_B, slice(first, first + len(slot_B))

    def _extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        views = []
        for store, new_BGD in ((self._cache.k[layer], k_TGD), (self._cache.v[layer], v_TGD)):
            store[self._slot_B, :, self.position_B] = new_BGD
            views.append(store[self._span, :, : self.reach])
        return views[0], views[1]
