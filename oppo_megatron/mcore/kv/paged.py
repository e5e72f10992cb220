"""The paged key/value cache: a pool of blocks, a table per sequence, and flash-attn's kernel or Triton's.

Forked sequences share the full blocks of their prompt; each has its own copy of a partly filled one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.layout.kernels import FLASH, usable
from oppo_megatron.layout.memory import BLOCK_TOKENS
from oppo_megatron.mcore.attention import LEAST_CAPABILITY, Reading, WithSinks
from oppo_megatron.mcore.device import on_device, triton_runs
from oppo_megatron.mcore.kv.cached_plan import CallPlan, PagedCall, StepPlan, StepRows
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache


class PagedKernel(NamedTuple):
    """`attend`: (queries [T, N, D], key and value pool [P, K, G, D], call, scale, window, soft cap, sinks) -> [T, N, D], causal.

    `turn`: (queries, keys and values [T, G, X, D], RoPE's cos and sin [T, 1, D], blocks [T], offsets in them [T], pools)
    rotates, writes keys and values to the pools, and returns queries [T, N, D].
    """

    attend: Callable[[Tensor, Tensor, Tensor, PagedCall, float, int | None, float | None, Tensor | None], Tensor]
    turn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


def find_kernel(device: torch.device, dtype: torch.dtype) -> PagedKernel | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    triton = by_triton(device)
    return PagedKernel(flash_attn, triton and triton.turn) if usable(FLASH) else triton


@cache
def by_triton(device: torch.device) -> PagedKernel | None:
    kernels = partial(import_module, "oppo_megatron.mcore.kv.triton_kernel")
    one_1, pool = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, 16, 1, 16, dtype=torch.bfloat16, device=device)
    call = PagedCall(one_1[:, None] - 1, one_1, one_1, 1, 1)
    if not triton_runs(
        lambda: kernels().triton_attention(pool[0, :1], pool, pool, call, 1.0), "without flash-attn KV caches are dense"
    ):
        return None
    return PagedKernel(kernels().triton_attention, kernels().triton_turn)


def flash_attn(
    q_TND: Tensor, k_PKGD: Tensor, v_PKGD: Tensor, call: PagedCall, scale: float, window: int | None = None,
    cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    # positions before and after its own that a token attends to; -1: all
    options: dict[str, Any] = {
        "softmax_scale": scale, "causal": True, "window_size": (-1 if window is None else window - 1, 0),
        "block_table": call.table_SW, **({} if cap is None else {"softcap": cap}),
    }  # fmt: skip
    if call.most_new == 1:
        options |= {} if sinks is None else {"return_softmax_lse": True}
        found = flash_attn_with_kvcache(q_TND[:, None], k_PKGD, v_PKGD, cache_seqlens=call.length_S, **options)
        if sinks is None:
            return found[:, 0]
        return WithSinks.apply(found[0][:, 0], found[1].squeeze(-1).t(), sinks)
    options |= {} if sinks is None else {"return_attn_probs": True}
    found = flash_attn_varlen_func(
        q_TND, k_PKGD, v_PKGD, cu_seqlens_q=call.new_ends, cu_seqlens_k=call.length_ends, max_seqlen_q=call.most_new,
        max_seqlen_k=call.longest, **options,
    )  # fmt: skip
    return found if sinks is None else WithSinks.apply(*found[:2], sinks)


class PagedKVCache(SequenceCache):
    """Storage k, v: per layer [P, K, G, D]; whole: [2 * layers, P, K, G, D].  Without a `kernel`, blocks are gathered."""

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, max_length: int, block_tokens: int = BLOCK_TOKENS,
        kernel: PagedKernel | None = None, **sizes: Any,
    ):  # fmt: skip
        self.block_tokens, self.kernel = block_tokens, kernel
        self.width = width = -(-max_length // block_tokens)
        super().__init__(lambda slots: (slots * width, block_tokens, num_kv_heads, head_dim), max_length=max_length, **sizes)
        num_blocks = self.num_slots * width
        self._free = list(range(num_blocks))[::-1]  # the next one last
        self._users = [0] * num_blocks  # of each block: number of tables that contain it
        self._tables: list[list[int]] = [[] for _ in range(self.num_slots)]

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def tables(self, slots: Sequence[int], width: int) -> Tensor:
        """Int32 [S, W]; entries past a slot's last block are arbitrary."""
        rows = [self._tables[slot][:width] for slot in slots]
        padded = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)  # faster than by `torch.tensor`
        return on_device(torch.from_numpy(padded), self.device)

    def step_rows(self) -> StepRows:
        return _PagedRows(self)

    def places(self, plan: CallPlan) -> _PagedPlaces:
        table_SW, lens_S = self.tables(plan.slots, -(-plan.longest // self.block_tokens)), plan.lens_S.int()
        call = PagedCall(table_SW, lens_S, plan.past_S.int() + lens_S, max(plan.lens), plan.longest)
        return _PagedPlaces(self, call, plan.row_T, plan.pos_T)

    def _move(self, source: int, target: int, length: int) -> None:
        self._tables[target], self._tables[source] = self._tables[source], []

    def _swap(self, one: int, other: int, length: int) -> None:
        self._tables[one], self._tables[other] = self._tables[other], self._tables[one]

    def _share(self, source: int, targets: list[int], length: int) -> None:
        whole, rest = divmod(length, self.block_tokens)
        blocks = self._tables[source][:whole]
        copies = self._copies(self._tables[source][whole], len(targets), rest) if rest else []
        for place, target in enumerate(targets):
            self._tables[target] = [*blocks, *copies[place : place + 1]]
        for block in blocks:
            self._users[block] += len(targets)

    def _extend(self, slot: int, length: int) -> None:
        table, (whole, rest) = self._tables[slot], divmod(self._lengths[slot], self.block_tokens)
        if rest and self._users[table[whole]] > 1:  # truncated within a block that others share
            shared = table[whole]
            (table[whole],) = self._copies(shared, 1, rest)
            self._give(shared)
        while len(table) * self.block_tokens < length:
            table.append(self._take())

    def _shorten(self, slot: int, length: int) -> None:
        table, kept = self._tables[slot], -(-length // self.block_tokens)
        while len(table) > kept:
            self._give(table.pop())

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _give(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def _copies(self, block: int, count: int, length: int) -> list[int]:
        """Copy a block's first `length` positions to `count` new blocks; an error leaves none taken."""
        copies = [self._take() for _ in range(count)]
        try:
            self.whole[:, on_device(copies, self.device), :length] = self.whole[:, block, None, :length].clone()
        except BaseException:
            for copy in copies:
                self._give(copy)
            raise
        return copies

    def _read(self, slot: int, length: int) -> Tensor:
        table_W = on_device(self._tables[slot], self.device)
        return self.whole[:, table_W].flatten(1, 2)[:, :length].contiguous()

    def _write(self, slot: int, stored: Tensor) -> None:
        position_L = torch.arange(stored.shape[1], device=self.device)
        block_L = on_device(self._tables[slot], self.device)[position_L // self.block_tokens]
        self.whole[:, block_L, position_L % self.block_tokens] = stored


class _PagedPlaces:
    def __init__(self, cache: PagedKVCache, call: PagedCall, row_T: Tensor, pos_T: Tensor):
        self._cache, self._call = cache, call
        self._block_T = call.table_SW[row_T, pos_T // cache.block_tokens].long()
        self._offset_T = pos_T % cache.block_tokens

    def attend(self, layer: int, q_TGRD: Tensor, k_TGD: Tensor, v_TGD: Tensor, reading: Reading) -> Tensor | None:
        if self._cache.kernel is None:
            return None
        return self._kernels(q_TGRD.flatten(1, 2), self._write(layer, k_TGD, v_TGD), reading)

    def turn_and_attend(self, layer: int, qkv_TGXD: Tensor, turns_T1D: Sequence[Tensor], reading: Reading) -> Tensor | None:
        if self._cache.kernel is None or self._cache.kernel.turn is None:
            return None
        pools, (cos_T1D, sin_T1D) = (self._cache.k[layer], self._cache.v[layer]), turns_T1D
        q_TND = self._cache.kernel.turn(qkv_TGXD, cos_T1D, sin_T1D, self._block_T, self._offset_T, *pools)
        return self._kernels(q_TND, pools, reading)

    def _kernels(self, q_TND: Tensor, pools: tuple[Tensor, Tensor], reading: Reading) -> Tensor:
        assert self._cache.kernel is not None
        scale, window, cap, _, sinks = reading
        return self._cache.kernel.attend(q_TND, *pools, self._call, scale, window, cap, sinks).flatten(1)

    def extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        table_SW = self._call.table_SW[:, : -(-longest // self._cache.block_tokens)]
        k, v = (pool[table_SW].flatten(1, 2)[:, :longest].transpose(1, 2) for pool in self._write(layer, k_TGD, v_TGD))
        return k, v

    def _write(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        pools = self._cache.k[layer], self._cache.v[layer]
        for pool, new_TGD in zip(pools, (k_TGD, v_TGD), strict=True):
            pool[self._block_T, self._offset_T] = new_TGD
        return pools


class _PagedRows(StepRows):
    def __init__(self, cache: PagedKVCache):
        self._cache = cache
        shape = cache.num_slots, cache.width
        self._table_MW = torch.zeros(shape, dtype=torch.int32, device=cache.device)
        self._number_M = torch.arange(cache.num_slots, device=cache.device)

    def load(self, slots: Sequence[int]) -> None:
        self._table_MW[: len(slots)] = self._cache.tables(slots, self._cache.width)

    @property
    def key(self) -> Hashable:
        return None

    def reach(self, longest: int) -> int:
        return self._cache.bucket(longest) if self._cache.kernel is None else self._cache.max_length

    def plan(self, position_B: Tensor, reach: int, idle_B: Tensor) -> StepPlan:
        num_rows, length_B = len(position_B), position_B.masked_fill(idle_B, 0).int() + 1
        call = PagedCall(self._table_MW[:num_rows], torch.ones_like(length_B), length_B, 1, reach)
        places = _PagedPlaces(self._cache, call, self._number_M[:num_rows], position_B)
        return StepPlan(self._cache, places, position_B, reach)
