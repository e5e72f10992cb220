"""Attention of new tokens to cached positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.mcore.attention import apply_rope, binding
from oppo_megatron.mcore.cpu import CALL_NUMBERS, blocks
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.kv.call_parts import Part, PartsOfCall, beyond_mask, each_alone, parts_of

FEW_TOKENS = 48  # average new tokens per sequence below which a CPU attends for all sequences at once


class Places(Protocol):
    def attend(self, layer: int, q_TGRD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None) -> Tensor | None:
        """Cache k and v and attend -> [T, N * D]; None without a kernel."""

    def extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cache k and v; return all cached ones, each [S, G, longest, D]."""


class Cache(Protocol):
    rope: tuple[Tensor, Tensor]
    dtype: torch.dtype
    device: torch.device

    def places(self, plan: CallPlan) -> Places: ...


class CachedPlan(ABC):
    qkv_format = "thd"
    places: Places

    def __init__(self, cache: Cache, pos_T: Tensor, longest: int):
        self.pos_T, self.longest, self._dtype = pos_T, longest, cache.dtype
        cos_LD, sin_LD = cache.rope
        self.cos_T1D, self.sin_T1D = cos_LD[pos_T].unsqueeze(1), sin_LD[pos_T].unsqueeze(1)

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None) -> Tensor:
        q_TND = apply_rope(q_TND, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        k_TGD = apply_rope(k_TGD, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        q_TGRD = q_TND.view(len(q_TND), k_TGD.shape[1], -1, q_TND.shape[-1])
        return self._attention(layer, q_TGRD, k_TGD, v_TGD, scale, window)

    def attend_grouped(self, layer: int, qkv_TGXD: Tensor, window: int | None = None) -> Tensor:
        cos, sin = self.cos_T1D.unsqueeze(1), self.sin_T1D.unsqueeze(1)
        qk_TGXD = apply_rope(qkv_TGXD[:, :, :-1], cos, sin).to(qkv_TGXD.dtype)
        scale = qkv_TGXD.shape[-1] ** -0.5
        return self._attention(layer, qk_TGXD[:, :, :-1], qk_TGXD[:, :, -1], qkv_TGXD[:, :, -1], scale, window)

    def _attention(self, layer: int, q_TGRD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None) -> Tensor:
        found = self.places.attend(layer, q_TGRD, k_TGD, v_TGD, scale, window)
        if found is not None:
            return found
        return self._over(q_TGRD, *self.places.extend(layer, k_TGD, v_TGD, self.longest), scale, binding(window, self.longest))

    @abstractmethod
    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float, window: int | None) -> Tensor:
        """Attend to cached positions -> [T, N * D]."""


class CallPlan(CachedPlan):
    def __init__(self, cache: Cache, slots: list[int], past: list[int], lens: list[int]):
        self.slots, self.past, self.lens = slots, past, lens
        self.decode = max(lens) == 1
        self._device = cache.device
        # By window, made in the first layer that has it.
        self._steps: dict[int | None, list[tuple[slice, slice, Tensor | None]]] = {}
        self._parts: dict[int | None, PartsOfCall] = {}
        self.slots_S, self.past_S, self.lens_S = on_device([slots, past, lens], cache.device).unbind(0)
        pos_T = self.past_S
        if not self.decode:
            first_S = torch.cumsum(self.lens_S, 0) - self.lens_S
            self.col_T = torch.arange(len(self.row_T), device=cache.device) - first_S[self.row_T]
            pos_T = self.past_S[self.row_T] + self.col_T
        super().__init__(cache, pos_T, max(p + n for p, n in zip(past, lens, strict=True)))
        self.places = cache.places(self)

    @cached_property
    def row_T(self) -> Tensor:
        number_S = torch.arange(len(self.lens), device=self._device)
        return number_S if self.decode else torch.repeat_interleave(number_S, self.lens_S, output_size=sum(self.lens))

    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float, window: int | None) -> Tensor:
        if self.decode:
            return self._attend_last(q_TGRD, k_SGLD, v_SGLD, scale, window)
        if window not in self._parts:
            repeat, places = q_TGRD.shape[2], (self.row_T, self.col_T)
            if self.parts_on(self._device):
                parts = parts_of(self.past, self.lens, repeat, window)
            elif sum(self.lens) >= FEW_TOKENS * len(self.lens):
                parts = each_alone(self.past, self.lens, window)
            else:
                parts = [
                    Part(rows, slice(0, max(self.lens[rows])), self._keys(rows, window), window, causal=False)
                    for rows in self._stretches(k_SGLD)
                ]
            self._parts[window] = PartsOfCall(parts, self.lens, self.past_S, places, repeat, self._dtype)
        return self._parts[window].attend(q_TGRD, k_SGLD, v_SGLD, scale)

    @staticmethod
    def parts_on(device: torch.device) -> bool:
        return device.type != "cpu"

    def _stretches(self, cached_SGLD: Tensor) -> list[slice]:
        """Group neighbours of similar length, on a CPU."""
        if self._device.type != "cpu":
            return [slice(0, len(self.lens))]
        _, groups, _, dim = cached_SGLD.shape
        reaches = [(past + new,) for past, new in zip(self.past, self.lens, strict=True)]
        return blocks(reaches, CALL_NUMBERS / (2 * groups * dim))

    def _attend_last(self, q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float, window: int | None) -> Tensor:
        steps = self._steps.get(window)
        if steps is None:
            steps = self._steps[window] = []
            for rows in self._stretches(k_SGLD):
                keys, equal = self._keys(rows, window), len(set(self.past[rows])) == 1
                steps.append((rows, keys, None if equal else beyond_mask(self.past_S[rows], keys, self._dtype, window)))
        outputs = [
            attend_one(q_SGRD[rows], k_SGLD[rows, :, keys], v_SGLD[rows, :, keys], mask, scale) for rows, keys, mask in steps
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _keys(self, rows: slice, window: int | None) -> slice:
        past, lens = self.past[rows], self.lens[rows]
        first = 0 if window is None else max(0, min(past) + 1 - window)
        return slice(first, max(p + n for p, n in zip(past, lens, strict=True)))


class StepPlan(CachedPlan):
    """One new token per row; only the device knows positions, below `reach`."""

    def __init__(self, cache: Cache, places: Places, position_B: Tensor, reach: int):
        super().__init__(cache, position_B, reach)
        self.places = places
        self._masks: dict[int | None, Tensor] = {}  # by window

    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = beyond_mask(self.pos_T, slice(0, self.longest), self._dtype, window)
        return attend_one(q_TGRD, k_SGLD, v_SGLD, self._masks[window], scale)


class StepRows(ABC):
    """Decode rows in tensors with fixed addresses."""

    @abstractmethod
    def load(self, slots: Sequence[int]) -> None:
        """Rows may share slots."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Key for which a captured step is valid."""

    @abstractmethod
    def reach(self, longest: int) -> int:
        """Return one of few bounds, at least `longest`."""

    @abstractmethod
    def plan(self, position_B: Tensor, reach: int, idle_B: Tensor) -> StepPlan:
        """Idle rows, whose output nobody reads, may attend to less."""


def attend_one(q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend for one new token per sequence -> [S, N * D]."""
    out = F.scaled_dot_product_attention(q_SGRD, k_SGLD, v_SGLD, attn_mask=mask, scale=scale)
    return out.reshape(len(q_SGRD), -1)
