"""Mixtures of experts, whole experts divided over the tensor ranks, in training also of neighbouring replicas.

Each tensor rank computes its own experts' part of the sum for all tokens, as megatron-core's parallel products do: no token
changes tensor ranks.  Pairs of token and expert go to the replica that holds the expert, and come back.
Legend: T tokens, H hidden, F feed-forward, E experts, K experts per token, N pairs, M pairs of other ranks' tokens too, I inputs,
O outputs, R replicas that divide experts.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from oppo_megatron.layout.experts import Experts
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.device import on_device
from oppo_megatron.mcore.layers import gated, tag_parameter

_NAMES = {"router": "router", "gate_up": "experts.experts.linear_fc1", "down": "experts.experts.linear_fc2"}
SAVED = {f"{ours}_bias": f"{saved}.bias" for ours, saved in _NAMES.items()} | {x: f"{y}.weight" for x, y in _NAMES.items()}
"""megatron-core's names of the parameters in checkpoints; a name comes before those that it begins with."""

ANY, BYTES = 255, 6
"""In place of an expert's number: the router chooses; numbers of experts that a float64 holds exactly."""


@dataclass
class Routing:
    """The experts of a call's tokens: `given` [T, L, K] (bytes, from the model's first layer on), and those `taken` by layer."""

    given: Tensor | None = None
    taken: list[Tensor] | None = None


def route_bytes(shape: ModelShape) -> int:
    assert shape.experts is not None
    return -(-shape.num_layers * shape.experts.active // 24) * 24  # divisible for base64, float64 and int64


def route_words(routes_RI: Tensor, shape: ModelShape) -> Tensor:
    """Float64 [W, R] of bytes: numbers of experts, of all layers in turn."""
    whole_RI = F.pad(routes_RI, (0, route_bytes(shape) - routes_RI.shape[1]), value=ANY)
    factors = 256 ** torch.arange(BYTES, device=routes_RI.device)
    return (whole_RI.view(len(whole_RI), -1, BYTES) * factors).sum(-1).double().T


def route_content(words_WN: npt.NDArray[np.float64]) -> bytes:
    """The bytes of tokens in turn."""
    return np.ascontiguousarray(words_WN.T, dtype="<i8").view(np.uint8).reshape(-1, 8)[:, :BYTES].tobytes()


def replay(routes: Sequence[str], rows_R: Tensor, num_tokens: int, shape: ModelShape) -> Routing:
    """Use the experts of `routes` (`chunks.split_routes`) at rows; elsewhere the routers choose."""
    assert shape.experts is not None
    size, layers, active = route_bytes(shape), shape.num_layers, shape.experts.active
    free = "/" * (size * 4 // 3)
    content = bytearray(b64decode("".join(route or free for route in routes)))
    of_rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, size)[:, : layers * active].reshape(-1, layers, active)
    given_TLK = torch.full((num_tokens, layers, active), ANY, dtype=torch.uint8, device=rows_R.device)
    return Routing(given_TLK.index_copy(0, rows_R, on_device(of_rows, rows_R.device)))


def choose(logits_TE: Tensor, experts: Experts, given_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token [T, K], those in `given_TK` if any, and their float32 weights.

    Weights are a softmax over all experts, or over the chosen ones, as in transformers' routers.
    """
    weights_TE = logits_TE.softmax(-1, dtype=torch.float32)
    chosen_TK = weights_TE.topk(experts.active).indices
    if given_TK is not None:
        chosen_TK = torch.where(given_TK == ANY, chosen_TK, given_TK)
    weights_TK = weights_TE.gather(1, chosen_TK)
    return chosen_TK, weights_TK / weights_TK.sum(-1, keepdim=True) if experts.normalised else weights_TK


def grouped_product(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Return x W_e^T [N, O] for rows up to each expert's end; later rows are arbitrary."""
    if hasattr(F, "grouped_mm"):  # since torch 2.10
        return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=ends_E)
    counts = [*ends_E.diff(prepend=ends_E.new_zeros(1)).tolist(), len(x_NI) - int(ends_E[-1])]
    *parts, rest = x_NI.split(counts)
    products = [F.linear(part, weight_OI) for part, weight_OI in zip(parts, weight_EOI, strict=True)]
    return torch.cat([*products, x_NI.new_zeros(len(rest), weight_EOI.shape[1])])


class _Spread(torch.autograd.Function):
    """x [T, H] -> rows of pairs [N, H]; `place_N`: token x K + choice."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, place_N: Tensor, active: int) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.sizes = len(x_TH), active
        return x_TH.index_select(0, place_N // active)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grad_NH, *ctx.saved_tensors, *ctx.sizes), None, None


class _Collect(torch.autograd.Function):
    """Rows of pairs [N, H] -> their sums [T, H], in an order that does not depend on the device's timing."""

    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, place_N: Tensor, num_tokens: int, active: int) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.active = active
        return _sums(y_NH, place_N, num_tokens, active)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        return grad_TH.index_select(0, place_N // ctx.active), None, None, None


def _sums(y_NH: Tensor, place_N: Tensor, num_tokens: int, active: int) -> Tensor:
    """Rows at place T x K are left out."""
    all_NH = y_NH.new_zeros(num_tokens * active + 1, y_NH.shape[1]).index_copy_(0, place_N, y_NH)
    return all_NH[:-1].view(num_tokens, active, -1).sum(1)


class _Ordered(torch.autograd.Function):
    """Rows in another order; `back_M`: its inverse."""

    @staticmethod
    def forward(ctx: Any, rows_MI: Tensor, order_M: Tensor, back_M: Tensor) -> Tensor:
        ctx.save_for_backward(back_M)
        return rows_MI.index_select(0, order_M)

    @staticmethod
    def backward(ctx: Any, grad_MI: Tensor) -> tuple[Tensor, None, None]:
        (back_M,) = ctx.saved_tensors
        return grad_MI.index_select(0, back_M), None, None


class Exchange:
    """Passes rows of pairs, sorted by expert, to the replicas that hold the experts, and back.

    The given `ends_E` are of the experts of all `replicas` in turn, the attribute and the passed rows of this rank's experts.
    """

    def __init__(self, ends_E: Tensor, replicas: dist.ProcessGroup):
        sent_RE = ends_E.diff(prepend=ends_E.new_zeros(1)).view(replicas.size(), -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE, group=replicas)
        self._group, self.ends_E = replicas, received_RE.sum(0).cumsum(0).to(torch.int32)
        self._sent, self._received = torch.stack([sent_RE, received_RE]).sum(-1).tolist()  # the host waits
        self.num_sent, num_received = sum(self._sent), sum(self._received)
        expert_RE = torch.arange(sent_RE.shape[1], device=ends_E.device).expand_as(sent_RE)
        expert_M = expert_RE.flatten().repeat_interleave(received_RE.flatten(), output_size=num_received)
        self._order_M = expert_M.argsort(stable=True)
        self._place_M = self._order_M.argsort()

    def there(self, rows: Tensor) -> Tensor:
        return _Ordered.apply(all_to_all(self._group, rows, self._received, self._sent), self._order_M, self._place_M)

    def back(self, rows: Tensor) -> Tensor:
        return all_to_all(self._group, _Ordered.apply(rows, self._place_M, self._order_M), self._sent, self._received)


def mix(
    x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor, first: int, *, is_part: bool, waits: bool,
    replicas: dist.ProcessGroup | None = None, biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """Sum the outputs of experts `first` to `first + len(down) - 1`; `is_part`: other tensor ranks have the rest.

    `waits`: let the host wait, so that pairs of others take neither memory nor time.  `replicas` hold the next experts, as many
    each, and take part.  `biases`: of both products.
    """
    assert waits or replicas is None, "decoding does not wait for other replicas"
    (num_tokens, active), count = chosen_TK.shape, len(down) * (1 if replicas is None else replicas.size())
    number_N = (chosen_TK - first).flatten()
    if is_part:
        number_N = torch.where((number_N >= 0) & (number_N < count), number_N, count)  # others' come last
    sorted_N, place_N = number_N.sort(stable=True)
    ends_E = torch.searchsorted(sorted_N, torch.arange(count, device=x_TH.device), right=True).to(torch.int32)
    exchange = None if replicas is None else Exchange(ends_E, replicas)
    if exchange is not None:
        place_N = place_N[: exchange.num_sent]
    elif is_part and waits:
        place_N = place_N[: int(ends_E[-1])]
    share_N1 = weights_TK.to(x_TH.dtype).flatten().index_select(0, place_N).unsqueeze(1)
    out_N = _Spread.apply(x_TH, place_N, active)  # by one name: freed soon
    if exchange is not None:
        out_N, share_N1, ends_E = exchange.there(out_N), exchange.there(share_N1), exchange.ends_E
    out_N = grouped_product(out_N, gate_up, ends_E)
    if biases is not None:  # by products, whose gradients do not depend on the device's timing
        row_N, number_E = (torch.arange(size, dtype=torch.int32, device=x_TH.device) for size in (len(out_N), len(down)))
        own_NE = (torch.searchsorted(ends_E, row_N, right=True).unsqueeze(1) == number_E).to(out_N.dtype)
        out_N = torch.addmm(out_N, own_NE, biases[0])
    out_N = gated(out_N, "silu", clamp)
    out_N = grouped_product(out_N * share_N1, down, ends_E)
    if biases is not None:
        out_N = torch.addmm(out_N, own_NE * share_N1, biases[1])
    if exchange is not None:
        out_N = exchange.back(out_N)
    if is_part and not waits:  # rows of others are arbitrary
        place_N = torch.where(sorted_N < len(down), place_N, num_tokens * active)
    return _Collect.apply(out_N, place_N, num_tokens, active)


class ExpertMLP(torch.nn.Module):
    plan: Any = None  # of the call

    def __init__(self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection, layer: int):
        super().__init__()
        group = groups.tp
        self.experts, self.group, self.layer = experts, group, layer
        self.is_part, self._in_shards = group.size() > 1, bool(config.sequence_parallel)
        self._holders, self._copies, self._replicas = groups.tp_ep, groups.expt_dp, groups.ep if groups.ep.size() > 1 else None
        count, hidden, options = experts.count // groups.tp_ep.size(), config.hidden_size, {"dtype": config.params_dtype}
        self.first = count * group.rank() if self._replicas is None else 0
        self.router = torch.nn.Parameter(torch.empty(experts.count, hidden, **options))
        self.gate_up = torch.nn.Parameter(torch.empty(count, 2 * experts.ffn_size, hidden, **options))
        self.down = torch.nn.Parameter(torch.empty(count, hidden, experts.ffn_size, **options))
        tag_parameter(self.router, "sequence_parallel", self._in_shards)
        self.router_bias = None
        if config.add_bias_linear:
            self.router_bias = torch.nn.Parameter(torch.empty(experts.count, **options))
            self.gate_up_bias = torch.nn.Parameter(torch.empty(count, 2 * experts.ffn_size, **options))
            self.down_bias = torch.nn.Parameter(torch.empty(count, hidden, **options))
            tag_parameter(self.router_bias, "sequence_parallel", self._in_shards)
        for name, weight in self.named_parameters():
            if not name.startswith("router"):
                set_tensor_model_parallel_attributes(weight, True, 0, 1)
                tag_parameter(weight, "allreduce", self._replicas is None)  # else megatron-core sums gradients over `expt_dp`

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        x_TH, group = hidden.squeeze(1), self.group
        chosen_TK, weights_TK = self._route(x_TH, self.plan.routing)
        if self._in_shards:
            chosen_TK, weights_TK, x_TH = (
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
                for x in (chosen_TK, weights_TK, x_TH)
            )
        elif self.is_part:  # the sum of the ranks' gradients
            weights_TK, x_TH = (copy_to_tensor_model_parallel_region(x, group=group) for x in (weights_TK, x_TH))
        out_TH = self._mix(x_TH, chosen_TK, weights_TK, self.plan)
        if self._in_shards:
            out_TH = reduce_scatter_to_sequence_parallel_region(out_TH, group=group)
        elif self.is_part:
            out_TH = reduce_from_tensor_model_parallel_region(out_TH, group=group)
        return out_TH.unsqueeze(1), None

    def _route(self, x_TH: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        given_TK = None
        if routing is not None and routing.given is not None:
            first = len(x_TH) * self.group.rank() if self._in_shards else 0
            given_TK = routing.given[first : first + len(x_TH), self.layer]
        chosen_TK, weights_TK = choose(F.linear(x_TH, self.router, self.router_bias), self.experts, given_TK)
        if routing is not None and routing.taken is not None:
            routing.taken.append(chosen_TK)
        return chosen_TK, weights_TK

    def _mix(self, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor, plan: Any) -> Tensor:
        if self._replicas is not None:
            chosen_TK = self._numbered(chosen_TK)
        biases = None if self.router_bias is None else (self.gate_up_bias, self.down_bias)
        return mix(
            x_TH, chosen_TK, weights_TK, self.gate_up, self.down, self.first, is_part=self.is_part, waits=plan.waits,
            replicas=self._replicas, biases=biases, clamp=self.experts.clamp,
        )  # fmt: skip

    def _numbered(self, chosen_TK: Tensor) -> Tensor:
        """Number the experts of this tensor rank's replicas in turn; other tensor ranks' come last."""
        count, tp = len(self.down), self.group.size()
        holder_TK = chosen_TK // count
        own_TK = holder_TK // tp * count + chosen_TK % count
        return torch.where(holder_TK % tp == self.group.rank(), own_TK, self.experts.count)

    def part(self, x_TH: Tensor, plan: Any) -> Tensor:
        """Return this rank's part of the sum, of hidden states that all ranks have (cached calls)."""
        return self._mix(x_TH, *self._route(x_TH, plan.routing), plan)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {name: 0 for name in SAVED if not name.startswith("router")},
            sharded_offsets, tp_group=self._holders, dp_cp_group=self._copies,
        )  # fmt: skip
        for name, _ in self.named_parameters():
            sharded[f"{prefix}{name}"].key = f"{prefix}{SAVED[name]}"
        return sharded


def with_experts(block: TransformerBlockSubmodules, experts: Experts) -> TransformerBlockSubmodules:
    for layer in block.layer_specs:
        layer.module, layer.params, layer.submodules.mlp = ExpertLayer, {"experts": experts}, IdentityOp
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)  # no product that it is fused with
    return block


class ExpertLayer(TransformerLayer):
    """A layer with an `ExpertMLP`, which megatron-core would not give its group."""

    def __init__(self, config: TransformerConfig, *args: Any, experts: Experts, pg_collection: Any, **kwargs: Any):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.mlp = ExpertMLP(config, experts, pg_collection, self.layer_number - 1)

    def forward(self, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
        self.mlp.plan = packed_seq_params  # here, because a layer that is computed again comes here again
        out = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        self.mlp.plan = None  # release it
        return out
