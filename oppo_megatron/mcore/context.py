"""Context parallelism: the ranks of a group share each packed sequence.

Rank r of c has stretches r and 2 c - 1 - r of 2 c, which give all ranks as many pairs of a query and a key.  Queries stay;
transformer-engine passes keys and values from rank to rank, or every rank gathers them, and their gradients are summed.
Legend: T packed tokens, S tokens of this rank, R rows of interest, N query heads, G key/value heads, K keys, D head
dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from oppo_megatron.cluster.process_groups import use_ring_once
from oppo_megatron.layout.kernels import TE, usable
from oppo_megatron.mcore.attention import CausalSpans, PackedPlan, binding
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.groups import RoleGroups


class SequenceShare:
    """This rank's share of packed sequences: the early and the late stretch of each in turn, as transformer-engine has them.

    A sequence is filled up to equal stretches with its last token.  `own`: tokens of every rank; `size`: filled up to a multiple
    of `multiple`; `own_S`: their packed positions; `positions_S`: those in the sequences; `rows_R`: rows in this share, filled up
    to as many on each rank; `chosen`: their indices among all rows.
    """

    def __init__(
        self, lengths: Sequence[int], rows: Sequence[int], group: dist.ProcessGroup, device: torch.device, multiple: int
    ):
        self.group, me, num_ranks, self._device = group, group.rank(), group.size(), device
        stretches = [-(-length // (2 * num_ranks)) for length in lengths]
        self.own, self.longest = 2 * sum(stretches), max(lengths)
        self.size = -(-self.own // multiple) * multiple
        self.whole = [2 * num_ranks * each for each in stretches]  # lengths on all ranks
        packed, positions, keys, places = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        first = own_first = 0
        for each, length in zip(stretches, lengths, strict=True):
            position = torch.arange(2 * num_ranks * each)
            stretch = position // each
            owner = torch.minimum(stretch, 2 * num_ranks - 1 - stretch)
            place = owner * self.own + own_first + (stretch >= num_ranks) * each + position % each  # on all ranks in turn
            keys += [place[: (me + 1) * each], place[: (2 * num_ranks - me) * each]]
            places.append(place[:length])
            positions.append(position[owner == me].clamp(max=length - 1))
            packed.append(first + positions[-1])
            first, own_first = first + length, own_first + 2 * each
        fill = 0, self.size - self.own
        self.own_S = on_device(F.pad(torch.cat(packed), fill), device)
        self.positions_S = F.pad(torch.cat(positions), fill)
        self.spans = CausalSpans([each for each in stretches for _ in range(2)], [len(seen) for seen in keys], device)
        self._keys = keys

        places_R = torch.cat(places)[torch.tensor(rows)]
        owner_R = places_R // self.own
        most = int(owner_R.bincount().max())
        order_R = torch.empty_like(places_R)
        for rank in range(num_ranks):
            own = (owner_R == rank).nonzero()[:, 0]
            order_R[own] = rank * most + torch.arange(len(own))
            if rank == me:
                self.chosen = own.tolist()
                self._chosen_R = on_device(own, device)
                self.rows_R = on_device(F.pad(places_R[own] % self.own, (0, most - len(own))), device)
        self._order_R = on_device(order_R, device)

    @cached_property
    def keys(self) -> Tensor:
        """Places, among the tokens of all ranks, of the keys that each stretch of `spans` sees."""
        return on_device(torch.cat(self._keys), self._device)

    @cached_property
    def ends(self) -> Tensor:
        """Ends of the sequences on all ranks, from 0 on."""
        return on_device([0, *accumulate(self.whole)], self._device, torch.int32)

    def own_rows(self, values_R: Tensor) -> Tensor:
        return F.pad(values_R[self._chosen_R], (0, len(self.rows_R) - len(self.chosen)))

    def of_all_rows(self, values_R: Tensor) -> Tensor:
        """Gather the values of all rows; the backward pass keeps this rank's, as every rank has the whole loss."""
        return gather_from_sequence_parallel_region(values_R, tensor_parallel_output_grad=False, group=self.group)[self._order_R]


class ContextPlan(PackedPlan):
    """Attention of this rank's queries to the keys and values of all ranks; `num_tokens`: at least the share's `size`."""

    def __init__(self, share: SequenceShare, rope: tuple[Tensor, ...], num_tokens: int):
        self._rotate_at(F.pad(share.positions_S, (0, num_tokens - share.size)), rope)
        self._share = share

    def _attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None, cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        share, (q_SND, k_SGD, v_SGD) = self._share, (x[: self._share.own] for x in (q_TND, k_TGD, v_TGD))
        out_SND = None
        if q_TND.is_cuda and binding(window, share.longest) is None and cap is None and sinks is None:
            out_SND = ring_attention(q_SND, k_SGD, v_SGD, scale, share)
        if out_SND is None:
            both = gather_from_sequence_parallel_region(
                torch.stack([k_SGD, v_SGD], 1), tensor_parallel_output_grad=True, group=share.group
            )
            k_KGD, v_KGD = both[share.keys].unbind(1)
            out_SND = share.spans.attend(q_SND, k_KGD, v_KGD, scale, window, cap, sinks)
        return F.pad(out_SND, (0, 0, 0, 0, 0, len(q_TND) - share.own))


def ring_attention(q_SND: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, share: SequenceShare) -> Tensor | None:
    """Attend by transformer-engine, which sends keys and values while it computes; None if it cannot."""
    if q_SND.dtype == torch.float32 or not usable(TE):
        return None
    attention = ring_of(share.group, q_SND.shape[1], k_SGD.shape[1], q_SND.shape[2], scale)
    longest = max(share.whole)
    try:
        out: Tensor = attention(
            q_SND, k_SGD, v_SGD, cu_seqlens_q=share.ends, cu_seqlens_kv=share.ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    except ValueError as error:  # it looks for a kernel before it sends anything
        if "No dot product attention" not in str(error):
            raise
        warnings.warn(f"{TE}: {error} Keys and values are gathered instead.", stacklevel=2)
        return None
    return out.view_as(q_SND)


def connect_ring(groups: RoleGroups, device: torch.device) -> None:
    """Make the communicators of `ring_attention`, before other messages wait for the device."""
    if groups.cp > 1 and device.type == "cuda" and usable(TE):
        use_ring_once(groups.context, device, [groups.context])


@cache
def ring_of(group: dist.ProcessGroup, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> Any:
    """Transformer-engine's attention, by heads of this rank."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_heads, head_dim, num_kv_heads, qkv_format="thd", attn_mask_type="padding_causal", softmax_scale=scale, cp_group=group,
        cp_global_ranks=dist.get_process_group_ranks(group), cp_stream=torch.cuda.Stream(), cp_comm_type="p2p",
    )  # fmt: skip
