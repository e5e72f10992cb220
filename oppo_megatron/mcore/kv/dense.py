"""The dense key/value cache: a slot of `max_length` positions per sequence; steps over neighbouring slots read one slice."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.kv.cached_plan import CallPlan, StepPlan, StepRows
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache

COPIED_NUMBERS = 2**25  # held aside at once: 64 MiB in bfloat16


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
    """Tokens go to `slot_T`, `pos_T`; `span`: slots of the call, a slice for neighbours."""

    def __init__(self, cache: KVCache, slot_T: Tensor, pos_T: Tensor, span: slice | Tensor):
        self._cache, self._slot_T, self._pos_T, self.span = cache, slot_T, pos_T, span

    def attend(self, *_: Any) -> None:
        return None

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
