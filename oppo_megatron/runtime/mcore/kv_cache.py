"""Key/value cache of one pipeline stage, with a length of its own for every sequence.

Legend: T packed tokens of a call, S sequences of the call, C longest chunk of the call, M slots, G key/value heads of this rank,
N query heads, L cached positions, D head dimension.

Life of a sequence:  open -> (begin .. commit)* -> [truncate -> (begin .. commit)*]* -> close

Sequences are known by id.  Closing one moves another into the gap, so a decode step over sequences in neighbouring slots reads
one dense slice and never gathers.  All bookkeeping is a function of the calls made, so every tensor- and pipeline-parallel rank
keeps the same books without a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.errors import CapacityError
from oppo_megatron.runtime.mcore.rope import apply_rope


class KVCache:
    """Storage k, v: per layer [M, G, L, D].  Raises CapacityError when the byte budget does not hold one sequence."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        max_length: int,
        rope: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int | None = None,
    ):
        slot_bytes = 2 * num_layers * num_kv_heads * max_length * head_dim * dtype.itemsize
        self.num_slots = num_slots if budget_bytes is None else min(num_slots, budget_bytes // slot_bytes)
        if self.num_slots < 1:
            raise CapacityError(
                f"a KV cache of {budget_bytes:,} bytes cannot hold one sequence of {max_length} tokens, which takes "
                f"{slot_bytes:,} bytes on this rank. Raise runtime.kv_cache_mb to at least {-(-slot_bytes // 2**20)}, "
                "or lower data.max_prompt_tokens or rollout.max_response_tokens."
            )
        self.max_length = max_length
        self.rope = rope
        self.device = device
        shape = (self.num_slots, num_kv_heads, max_length, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._slots: dict[int, int] = {}
        self._ids: list[int] = []
        self._lengths: list[int] = []

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._slots

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._slots)

    @property
    def seq_ids(self) -> list[int]:
        """The open sequences in the order of their slots."""
        return list(self._ids)

    def slot(self, seq_id: int) -> int:
        """Where the sequence lies now.  A call whose sequences come in the order of neighbouring slots gathers nothing."""
        return self._slots[seq_id]

    def length(self, seq_id: int) -> int:
        """Tokens cached for the sequence."""
        return self._lengths[self._slots[seq_id]]

    def open(self, seq_id: int) -> None:
        """Give the sequence a slot, empty."""
        assert seq_id not in self._slots, f"sequence {seq_id} is already open"
        if not self.num_free:
            raise CapacityError(
                f"sequence {seq_id} finds no free slot among {self.num_slots}; admission must wait for one to close."
            )
        self._slots[seq_id] = len(self._ids)
        self._ids.append(seq_id)
        self._lengths.append(0)

    def close(self, seq_id: int) -> None:
        """Free the sequence's slot; the sequence in the last one moves into the gap."""
        slot, last = self._slots.pop(seq_id), len(self._ids) - 1
        mover, length = self._ids.pop(), self._lengths.pop()
        if slot == last:
            return
        for store in (*self.k, *self.v):
            store[slot, :, :length] = store[last, :, :length]
        self._slots[mover], self._ids[slot], self._lengths[slot] = slot, mover, length

    def exchange(self, one: int, other: int) -> None:
        """Two sequences change slots: so those that go on can be kept side by side, and the other keeps what it has."""
        a, b = self._slots[one], self._slots[other]
        if a == b:
            return
        longest = max(self._lengths[a], self._lengths[b])
        for store in (*self.k, *self.v):
            store[[a, b], :, :longest] = store[[b, a], :, :longest]
        self._slots[one], self._slots[other] = b, a
        self._ids[a], self._ids[b] = other, one
        self._lengths[a], self._lengths[b] = self._lengths[b], self._lengths[a]

    def truncate(self, seq_id: int, length: int) -> None:
        """Roll the sequence back to its first `length` tokens."""
        assert 0 <= length <= self.length(seq_id), (seq_id, length, self.length(seq_id))
        self._lengths[self._slots[seq_id]] = length

    def begin(self, seq_ids: Sequence[int], lens: Sequence[int]) -> CachedPlan:
        """Plan a call that appends lens[s] tokens to sequence seq_ids[s].  Order of the tokens: as given."""
        slots = [self._slots[i] for i in seq_ids]
        past = [self._lengths[s] for s in slots]
        for seq_id, start, new in zip(seq_ids, past, lens, strict=True):
            if start + new > self.max_length:
                raise CapacityError(
                    f"sequence {seq_id}: {start} cached + {new} new tokens exceed the cache's {self.max_length} positions."
                )
        return CachedPlan(self, slots, past, list(lens))

    def commit(self, plan: CachedPlan) -> None:
        """The planned tokens are in the cache on every layer of this stage."""
        for slot, start, new in zip(plan.slots, plan.past, plan.lens, strict=True):
            self._lengths[slot] = start + new


class CachedPlan:
    """An `AttentionPlan` that continues sequences from their cache.  Computed once a call, used by every layer."""

    qkv_format = "thd"

    def __init__(self, cache: KVCache, slots: list[int], past: list[int], lens: list[int]):
        self.cache, self.slots, self.past, self.lens = cache, slots, past, lens
        self.decode = max(lens) == 1
        self.longest = max(p + n for p, n in zip(past, lens, strict=True))
        slots_S, past_S, lens_S = torch.tensor([slots, past, lens], device=cache.device).unbind(0)
        lo, hi = min(slots), max(slots) + 1
        self.span = (lo, hi) if slots == list(range(lo, hi)) else None
        self.slots_S = slots_S
        if self.decode:
            self.slot_T, self.pos_T = slots_S, past_S
            self.mask = self._decode_mask(past_S)
        else:
            self._plan_prefill(slots_S, past_S, lens_S)
        cos_LD, sin_LD = cache.rope
        self.cos_T1D, self.sin_T1D = cos_LD[self.pos_T].unsqueeze(1), sin_LD[self.pos_T].unsqueeze(1)

    def _decode_mask(self, past_S: Tensor) -> Tensor | None:
        """[S, 1, 1, L], 0 where a sequence has a token and minus infinity behind its last; none if all are equally long."""
        if min(self.past) == max(self.past):
            return None
        beyond_SL = torch.arange(self.longest, device=self.cache.device) > past_S[:, None]
        mask_SL = torch.zeros(beyond_SL.shape, dtype=self.cache.k[0].dtype, device=self.cache.device)
        return mask_SL.masked_fill_(beyond_SL, -torch.inf)[:, None, None]

    def _plan_prefill(self, slots_S: Tensor, past_S: Tensor, lens_S: Tensor) -> None:
        device = self.cache.device
        self.row_T = torch.repeat_interleave(torch.arange(len(self.lens), device=device), lens_S)
        first_S = torch.cumsum(lens_S, 0) - lens_S
        self.col_T = torch.arange(len(self.row_T), device=device) - first_S[self.row_T]
        self.slot_T, self.pos_T = slots_S[self.row_T], past_S[self.row_T] + self.col_T
        position_SC = past_S[:, None] + torch.arange(max(self.lens), device=device)
        visible_SCL = torch.arange(self.longest, device=device) <= position_SC[:, :, None]
        self.mask_SCL = visible_SCL

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        q_TND = apply_rope(q_TND, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        k_TGD = apply_rope(k_TGD, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        q_TGRD = q_TND.view(len(q_TND), k_TGD.shape[1], -1, q_TND.shape[-1])
        attend = self._attend_decode if self.decode else self._attend_prefill
        return attend(q_TGRD, *self._extend(layer, k_TGD, v_TGD), scale)

    def attend_grouped(self, layer: int, qkv_TGXD: Tensor) -> Tensor:
        """As `attend`, of queries, keys and values that lie side by side: X = the group's query heads, the key, the value."""
        cos, sin = self.cos_T1D.unsqueeze(1), self.sin_T1D.unsqueeze(1)
        qk_TGXD = apply_rope(qkv_TGXD[:, :, :-1], cos, sin).to(qkv_TGXD.dtype)
        kv = self._extend(layer, qk_TGXD[:, :, -1], qkv_TGXD[:, :, -1])
        attend = self._attend_decode if self.decode else self._attend_prefill
        return attend(qk_TGXD[:, :, :-1], *kv, qkv_TGXD.shape[-1] ** -0.5)

    def _extend(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v; all that is cached of the call's sequences, each [S, G, L, D]."""
        views = []
        for store, new_TGD in ((self.cache.k[layer], k_TGD), (self.cache.v[layer], v_TGD)):
            store[self.slot_T, :, self.pos_T] = new_TGD
            if self.span is not None:
                views.append(store[self.span[0] : self.span[1], :, : self.longest])
            else:
                views.append(store[:, :, : self.longest].index_select(0, self.slots_S))
        return views[0], views[1]

    def _attend_decode(self, q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float) -> Tensor:
        # The query heads of a group take the place of query positions, so grouped heads need no copy of keys.
        out = F.scaled_dot_product_attention(q_SGRD, k_SGLD, v_SGLD, attn_mask=self.mask, scale=scale)
        return out.reshape(len(q_SGRD), -1)

    def _attend_prefill(self, q_TGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, scale: float) -> Tensor:
        num_seqs, groups, _, dim = k_SGLD.shape
        chunk, repeat = self.mask_SCL.shape[1], q_TGRD.shape[2]
        # Only queries are padded to the longest chunk of the call, and only inside attention.
        q_SCGRD = q_TGRD.new_zeros(num_seqs, chunk, groups, repeat, dim)
        q_SCGRD[self.row_T, self.col_T] = q_TGRD
        q_SGRCD = q_SCGRD.permute(0, 2, 3, 1, 4)
        mask = self.mask_SCL[:, None].repeat(1, 1, repeat, 1)
        out = F.scaled_dot_product_attention(
            q_SGRCD.reshape(num_seqs, groups, repeat * chunk, dim), k_SGLD, v_SGLD, attn_mask=mask, scale=scale
        )
        out_SCGRD = out.view(num_seqs, groups, repeat, chunk, dim).permute(0, 3, 1, 2, 4)
        return out_SCGRD[self.row_T, self.col_T].reshape(len(self.row_T), -1)
