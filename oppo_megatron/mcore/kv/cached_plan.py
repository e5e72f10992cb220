"""Attention of new tokens to cached positions, by the kernel of a paged cache if it has one.  Otherwise a call of many tokens is
split into parts: short neighbouring sequences, padded, and single long ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.layout.activations import MASK_NUMBERS
from oppo_megatron.mcore.attention import Reading, apply_rope, binding, composed_attention, pieces, torch_attention, window_size
from oppo_megatron.mcore.cpu import CALL_NUMBERS, blocks
from oppo_megatron.mcore.device import on_device


def hidden_keys(position: Tensor, keys: slice, window: int | None) -> Tensor:
    """[..., L]: True for `keys` that a token at `position` [...] must not see; a window leaves at least one."""
    key_L, position_1 = torch.arange(keys.start, keys.stop, device=position.device), position.unsqueeze(-1)
    beyond = key_L > position_1
    return beyond if window is None else beyond | (key_L <= (position_1 - window).clamp(max=keys.stop - 2))


def beyond_mask(position_S: Tensor, keys: slice, dtype: torch.dtype, window: int | None) -> Tensor:
    """[S, 1, 1, L]: 0 for keys that the token at a sequence's position sees, else minus infinity."""
    hidden_SL = hidden_keys(position_S, keys, window)
    mask_SL = torch.zeros(hidden_SL.shape, dtype=dtype, device=position_S.device)
    return mask_SL.masked_fill_(hidden_SL, -torch.inf)[:, None, None]


CALL_SCORES = 2**20  # query-key pairs of a head computed in about the launch time of a call


@dataclass(frozen=True)
class Part:
    """New tokens `queries` of each of the sequences `rows`, over positions `keys`; `causal`: nothing was cached, so no mask."""

    rows: slice
    queries: slice
    keys: slice
    window: int | None
    causal: bool

    @property
    def alone(self) -> bool:
        return self.rows.stop - self.rows.start == 1

    def mask_numbers(self, repeat: int) -> int:
        queries, keys = (each.stop - each.start for each in (self.queries, self.keys))
        return 0 if self.causal else (self.rows.stop - self.rows.start) * repeat * queries * keys


def parts_of(past: Sequence[int], lens: Sequence[int], repeat: int, window: int | None, call: int = CALL_SCORES) -> list[Part]:
    """Split a GPU call; `repeat`: query heads per key head.  Each mask has at most MASK_NUMBERS numbers, or a single query."""
    return [part for rows in _groups(past, lens, call) for part in _bounded(past, lens, repeat, window, rows)]


def _groups(past: Sequence[int], lens: Sequence[int], call: int) -> Iterator[slice]:
    sizes = [(new, before + new) for before, new in zip(past, lens, strict=True)]
    large = [s for s, (new, reach) in enumerate(sizes) if new * reach >= call]
    first = 0
    for stop in [*large, len(sizes)]:
        if first < stop:
            yield from (slice(first + b.start, first + b.stop) for b in blocks(sizes[first:stop], call))
        if stop < len(sizes):
            yield slice(stop, stop + 1)
        first = stop + 1


def _bounded(past: Sequence[int], lens: Sequence[int], repeat: int, window: int | None, rows: slice) -> list[Part]:
    pasts, news = past[rows], lens[rows]
    reach, longest = max(p + n for p, n in zip(pasts, news, strict=True)), max(news)
    bound = binding(window, reach)
    if bound is None and max(pasts) == 0:
        return [Part(rows, slice(0, longest), slice(0, longest), None, True)]
    start = 0 if bound is None else max(0, min(pasts) + 1 - bound)
    whole = Part(rows, slice(0, longest), slice(start, reach), bound, False)
    if whole.mask_numbers(repeat) <= MASK_NUMBERS:
        return [whole]
    if not whole.alone:
        middle = (rows.start + rows.stop) // 2
        halves = slice(rows.start, middle), slice(middle, rows.stop)
        return [part for half in halves for part in _bounded(past, lens, repeat, window, half)]
    size = max(1, MASK_NUMBERS // (repeat * reach))
    return [Part(rows, queries, keys, bound, False) for queries, keys in pieces(longest, reach, bound, size)]


def each_alone(past: Sequence[int], lens: Sequence[int], window: int | None) -> list[Part]:
    """Return one part per sequence, several with a window, so that each reads only keys that it needs."""
    parts: list[Part] = []
    for s, (before, new) in enumerate(zip(past, lens, strict=True)):
        rows, reach = slice(s, s + 1), before + new
        bound = binding(window, reach)
        if bound is None:
            parts.append(Part(rows, slice(0, new), slice(0, reach), None, before == 0))
        else:
            parts += [Part(rows, queries, keys, bound, False) for queries, keys in pieces(new, reach, bound, window_size(bound))]
    return parts


class PartsOfCall:
    def __init__(
        self, parts: Sequence[Part], lens: Sequence[int], past_S: Tensor, places: tuple[Tensor, Tensor], repeat: int,
        dtype: torch.dtype,
    ):  # fmt: skip
        self._parts, self._past_S, self._places, self._repeat, self._dtype = parts, past_S, places, repeat, dtype
        self._first = [sum(lens[:s]) for s in range(len(lens) + 1)]
        numbers = sum(part.mask_numbers(repeat) for part in parts)
        self._masks = [self._mask(part) for part in parts] if numbers <= MASK_NUMBERS else None

    def attend(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, reading: Reading) -> Tensor:
        outputs = []
        for number, part in enumerate(self._parts):
            mask = self._mask(part) if self._masks is None else self._masks[number]
            k, v = (x[part.rows, :, part.keys] for x in (k_SGLD, v_SGLD))
            outputs.append(self._one(part, q_TGRD[self._tokens(part)], k, v, mask, reading))
            del mask
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _one(self, part: Part, q_TGRD: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, reading: Reading) -> Tensor:
        if part.alone:
            places, q_SCGRD = None, q_TGRD.unsqueeze(0)
        else:
            row_T, col_T = (place[self._tokens(part)] for place in self._places)
            places = row_T - part.rows.start, col_T
            q_SCGRD = q_TGRD.new_zeros(part.rows.stop - part.rows.start, part.queries.stop, *q_TGRD.shape[1:])
            q_SCGRD[places] = q_TGRD
        num_seqs, chunk, groups, repeat, dim = q_SCGRD.shape
        q_SGRCD = q_SCGRD.permute(0, 2, 3, 1, 4)
        heads = (groups * repeat, chunk) if mask is None or mask.shape[-2] == chunk else (groups, repeat * chunk)
        out = torch_attention(q_SGRCD.reshape(num_seqs, *heads, dim), k, v, reading.scale, mask, reading.cap, reading.sinks)
        out_SCGRD = out.view(num_seqs, groups, repeat, chunk, dim).permute(0, 3, 1, 2, 4)
        return (out_SCGRD[0] if places is None else out_SCGRD[places]).reshape(len(q_TGRD), -1)

    def _tokens(self, part: Part) -> slice:
        first = self._first[part.rows.start]
        if part.alone:
            return slice(first + part.queries.start, first + part.queries.stop)
        return slice(first, self._first[part.rows.stop])

    def _mask(self, part: Part) -> Tensor | None:
        """[S, 1, R C, L], on a CPU [1, 1, C, L] for one sequence: 0 or minus infinity."""
        if part.causal:
            return None
        col_C = torch.arange(part.queries.start, part.queries.stop, device=self._past_S.device)
        hidden_SCL = hidden_keys(self._past_S[part.rows, None] + col_C, part.keys, part.window)
        mask_SCL = torch.zeros(hidden_SCL.shape, dtype=self._dtype, device=col_C.device)
        mask_S1CL = mask_SCL.masked_fill_(hidden_SCL, -torch.inf)[:, None]
        shared = self._repeat == 1 or (part.alone and col_C.device.type == "cpu")
        return mask_S1CL if shared else mask_S1CL.repeat(1, 1, self._repeat, 1)


@dataclass(frozen=True)
class PagedCall:
    """Int32: sequence s has `new_S[s]` queries, `length_S[s]` tokens (queries included) in blocks `table_SW[s]`."""

    table_SW: Tensor
    new_S: Tensor
    length_S: Tensor
    most_new: int
    longest: int  # at least the largest of `length_S`

    @cached_property
    def new_ends(self) -> Tensor:
        return _ends(self.new_S)

    @cached_property
    def length_ends(self) -> Tensor:
        return _ends(self.length_S)


def _ends(counts_S: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts_S.cumsum(0, dtype=torch.int32), (1, 0))


FEW_TOKENS = 48  # average new tokens per sequence below which a CPU attends for all sequences at once


class Places(Protocol):
    def attend(self, layer: int, q_TGRD: Tensor, k_TGD: Tensor, v_TGD: Tensor, reading: Reading) -> Tensor | None:
        """Cache k and v and attend -> [T, N * D]; None without a kernel."""

    def turn_and_attend(self, layer: int, qkv_TGXD: Tensor, turns_T1D: Sequence[Tensor], reading: Reading) -> Tensor | None:
        """The same from what is not rotated."""

    def extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cache k and v; return all cached ones, each [S, G, longest, D]."""


class Cache(Protocol):
    rope: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device

    def places(self, plan: CallPlan) -> Places: ...


class CachedPlan(ABC):
    qkv_format = "thd"
    routing: Any = None
    waits = False
    places: Places

    def __init__(self, cache: Cache, pos_T: Tensor, longest: int):
        self.pos_T, self.longest, self._dtype = pos_T, longest, cache.dtype
        self._turns_T1D = [table_LD[pos_T].unsqueeze(1) for table_LD in cache.rope]

    def attend(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None,
        cap: float | None = None, table: int = 0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        turns = self._turns_T1D[2 * table :][:2]
        q_TND, k_TGD = (apply_rope(x, *turns).to(v_TGD.dtype) for x in (q_TND, k_TGD))
        q_TGRD = q_TND.view(len(q_TND), k_TGD.shape[1], -1, q_TND.shape[-1])
        return self._attention(layer, q_TGRD, k_TGD, v_TGD, Reading(scale, window, cap, sinks=sinks))

    def attend_grouped(self, layer: int, qkv_TGXD: Tensor, reading: Reading) -> Tensor:
        turns_T1D = self._turns_T1D[2 * reading.table :][:2]
        found = self.places.turn_and_attend(layer, qkv_TGXD, turns_T1D, reading)
        if found is not None:
            return found
        cos, sin = (turn.unsqueeze(1) for turn in turns_T1D)
        qk_TGXD = apply_rope(qkv_TGXD[:, :, :-1], cos, sin).to(qkv_TGXD.dtype)
        return self._attention(layer, qk_TGXD[:, :, :-1], qk_TGXD[:, :, -1], qkv_TGXD[:, :, -1], reading)

    def _attention(self, layer: int, q_TGRD: Tensor, k_TGD: Tensor, v_TGD: Tensor, reading: Reading) -> Tensor:
        found = self.places.attend(layer, q_TGRD, k_TGD, v_TGD, reading)
        if found is not None:
            return found
        bound = reading._replace(window=binding(reading.window, self.longest))
        return self._over(q_TGRD, *self.places.extend(layer, k_TGD, v_TGD, self.longest), bound)

    @abstractmethod
    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, reading: Reading) -> Tensor:
        """Attend to cached positions -> [T, N * D]."""


class CallPlan(CachedPlan):
    def __init__(self, cache: Cache, slots: list[int], past: list[int], lens: list[int]):
        """`lens[s]` new tokens follow `past[s]` cached ones in slot `slots[s]`."""
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

    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, reading: Reading) -> Tensor:
        if self.decode:
            return self._attend_last(q_TGRD, k_SGLD, v_SGLD, reading)
        window = reading.window
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
        return self._parts[window].attend(q_TGRD, k_SGLD, v_SGLD, reading)

    @staticmethod
    def parts_on(device: torch.device) -> bool:
        return device.type != "cpu"

    def _stretches(self, cached_SGLD: Tensor) -> list[slice]:
        """Group neighbours of similar length; on a GPU all are one group."""
        if self._device.type != "cpu":
            return [slice(0, len(self.lens))]
        _, groups, _, dim = cached_SGLD.shape
        reaches = [(past + new,) for past, new in zip(self.past, self.lens, strict=True)]
        return blocks(reaches, CALL_NUMBERS / (2 * groups * dim))

    def _attend_last(self, q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, reading: Reading) -> Tensor:
        window = reading.window
        steps = self._steps.get(window)
        if steps is None:
            steps = self._steps[window] = []
            for rows in self._stretches(k_SGLD):
                keys, equal = self._keys(rows, window), len(set(self.past[rows])) == 1
                steps.append((rows, keys, None if equal else beyond_mask(self.past_S[rows], keys, self._dtype, window)))
        how = reading.scale, reading.cap, reading.sinks
        outputs = [attend_one(q_SGRD[s], k_SGLD[s, :, keys], v_SGLD[s, :, keys], mask, *how) for s, keys, mask in steps]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _keys(self, rows: slice, window: int | None) -> slice:
        past, lens = self.past[rows], self.lens[rows]
        first = 0 if window is None else max(0, min(past) + 1 - window)
        return slice(first, max(p + n for p, n in zip(past, lens, strict=True)))


class StepPlan(CachedPlan):
    """A decode step of one token per row, at positions that only the device knows, all below `reach`."""

    def __init__(self, cache: Cache, places: Places, position_B: Tensor, reach: int):
        super().__init__(cache, position_B, reach)
        self.places = places
        self._masks: dict[int | None, Tensor] = {}  # by window

    def _over(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, reading: Reading) -> Tensor:
        scale, window, cap, _, sinks = reading
        if window not in self._masks:
            self._masks[window] = beyond_mask(self.pos_T, slice(0, self.longest), self._dtype, window)
        return attend_one(q_TGRD, k_SGLD, v_SGLD, self._masks[window], scale, cap, sinks)


class StepRows(ABC):
    """Decode rows in tensors with fixed addresses."""

    @abstractmethod
    def load(self, slots: Sequence[int]) -> None:
        """Set the cache slot of each row; padding rows share one."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Key for which a captured step is valid."""

    @abstractmethod
    def reach(self, longest: int) -> int:
        """Round `longest` up to one of few bounds, because each one needs its own capture."""

    @abstractmethod
    def plan(self, position_B: Tensor, reach: int, idle_B: Tensor) -> StepPlan:
        """Plan a step.  Idle rows, whose output nobody reads, may attend to fewer positions."""


def attend_one(
    q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, mask: Tensor | None, scale: float, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend for one new token per sequence -> [S, N * D]."""
    if cap is not None or sinks is not None:
        return composed_attention(q_SGRD, k_SGLD, v_SGLD, scale, mask, cap, sinks).reshape(len(q_SGRD), -1)
    out = F.scaled_dot_product_attention(q_SGRD, k_SGLD, v_SGLD, attn_mask=mask, scale=scale)
    return out.reshape(len(q_SGRD), -1)
