"""Context parallelism: the ranks of a group share each packed sequence.

Rank r of c has stretches r and 2 c - 1 - r of 2 c, which give all ranks as many pairs of a query and a key.  Queries stay;
keys and values of all ranks are gathered, and their gradients summed.
Legend: T packed tokens, S tokens of this rank (filled up), R rows of interest, N query heads, G key/value heads, K keys, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from oppo_megatron.mcore.attention import CausalSpans, PackedPlan
from oppo_megatron.mcore.device import on_device


def stretches(length: int, size: int, rank: int) -> tuple[range, range]:
    """Positions of a rank of `size`, early and late."""
    bounds = [length * i // (2 * size) for i in range(2 * size + 1)]
    last = 2 * size - 1 - rank
    return range(bounds[rank], bounds[rank + 1]), range(bounds[last], bounds[last + 1])


def _packed(stretches: Sequence[tuple[int, range]]) -> Tensor:
    return torch.cat([torch.arange(first + part.start, first + part.stop) for first, part in stretches])


class SequenceShare:
    """This rank's share of packed sequences: early stretches, then late ones, of all in turn.

    `size`: tokens of every rank, filled up to a multiple of `multiple`; `own_S`: their packed positions; `positions_S`: those in
    the sequences; `rows_R`: rows in this share, filled up to as many on each rank; `chosen`: their indices among all rows.
    """

    def __init__(
        self, lengths: Sequence[int], rows: Sequence[int], group: dist.ProcessGroup, device: torch.device, multiple: int
    ):
        self.group, me, num_ranks = group, group.rank(), group.size()
        firsts, held = [0, *accumulate(lengths)], list[list[tuple[int, range]]]()
        for rank in range(num_ranks):
            halves = zip(*(stretches(length, num_ranks, rank) for length in lengths), strict=True)
            held.append([part for half in halves for part in zip(firsts, half, strict=False)])
        packed = [_packed(parts) for parts in held]
        self.size = -(-max(map(len, packed)) // multiple) * multiple
        gathered_T = torch.empty(firsts[-1], dtype=torch.int64)  # the place of each packed token on all ranks in turn
        for rank, own in enumerate(packed):
            gathered_T[own] = rank * self.size + torch.arange(len(own))
        fill = 0, self.size - len(packed[me])
        self.own_S = on_device(F.pad(packed[me], fill), device)
        self.positions_S = F.pad(_packed([(0, part) for _, part in held[me]]), fill)

        self.spans, self.keys = list[CausalSpans](), list[Tensor]()
        for half in (held[me][: len(lengths)], held[me][len(lengths) :]):
            if seen := [(first, part) for first, part in half if part]:
                self.spans.append(CausalSpans([len(part) for _, part in seen], [part.stop for _, part in seen], device))
                self.keys.append(on_device(gathered_T[_packed([(first, range(part.stop)) for first, part in seen])], device))

        places_R = gathered_T[torch.tensor(rows)]
        owner_R = places_R // self.size
        most = int(owner_R.bincount().max())
        order_R = torch.empty_like(places_R)
        for rank in range(num_ranks):
            own = (owner_R == rank).nonzero()[:, 0]
            order_R[own] = rank * most + torch.arange(len(own))
            if rank == me:
                self.chosen = own.tolist()
                self._chosen_R = on_device(own, device)
                self.rows_R = on_device(F.pad(places_R[own] % self.size, (0, most - len(own))), device)
        self._order_R = on_device(order_R, device)

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
        share = self._share
        mine = torch.stack([k_TGD[: share.size], v_TGD[: share.size]], 1)
        both = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=True, group=share.group)
        none = both[:0].sum() + (0.0 if sinks is None else sinks[:0].sum())
        outputs, first = [q_TND[:0] + none], 0  # all ranks take part in the backward pass, those without a query too
        for spans, keys in zip(share.spans, share.keys, strict=True):
            k_KGD, v_KGD = both[keys].unbind(1)
            queries = q_TND[first : first + sum(spans.new)]
            outputs.append(spans.attend(queries, k_KGD, v_KGD, scale, window, cap, sinks))
            first += len(queries)
        out_TND = torch.cat(outputs)
        return F.pad(out_TND, (0, 0, 0, 0, 0, len(q_TND) - len(out_TND)))
