"""Low-rank adapters of parallel products: y = W x + s B A x (Hu et al. 2021), a pair per Hugging Face target.

Column-parallel products cut B by rows and sum the gradient of its input.  Row-parallel ones cut A by columns and sum B A x with
the product (cached calls), or A x (training).
Legend: T packed tokens, I inputs, G key/value heads, R query heads of each, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.layout.hf_layout import PRODUCTS, Product, pair_sizes
from oppo_megatron.mcore.layers import tag_parameter


class Pair(torch.nn.Module):
    def __init__(self, sizes: tuple[tuple[int, int], tuple[int, int]], cut: Literal["rows", "columns"], like: Tensor):
        """`sizes` of A and B on this rank; `cut`: B by rows or A by columns."""
        super().__init__()
        (rank, inputs), (outputs, _) = sizes
        self.lora_A = torch.nn.Parameter(like.new_empty(rank, inputs))
        self.lora_B = torch.nn.Parameter(like.new_empty(outputs, rank))
        sharded, dim = (self.lora_B, 0) if cut == "rows" else (self.lora_A, 1)
        set_tensor_model_parallel_attributes(sharded, True, dim, 1)


class Adapters(torch.nn.Module):
    def __init__(self, model: Any, product: Product, lora: LoraConfig, like: Tensor):
        super().__init__()
        sizes = pair_sizes(model.shape, lora.rank, model.groups.tp)
        self._targets, self._cut, self._scale = product.targets, product.cut, lora.scale
        self._widths = {target: sizes[target][1][0] for target in product.targets}
        self._key_heads = model.shape.num_kv_heads // model.groups.tp
        self._group, self._sequence_parallel = model.groups.collection.tp, bool(model.config.sequence_parallel)
        self._names = [target for target in product.targets if target in lora.projections]
        for name in self._names:
            pair = Pair(sizes[name], product.cut, like)
            self.add_module(name, pair)
            if self._sequence_parallel:
                tag_parameter(pair.lora_A if product.cut == "rows" else pair.lora_B, "sequence_parallel", True)

    def forward(self, x: Tensor) -> Tensor:
        return self._join({name: self._one(self.get_submodule(name), x) for name in self._names})

    def cached(self, x_TI: Tensor) -> Tensor:
        """Return the addition before the sum over ranks."""
        pairs: list[Any] = [self.get_submodule(name) for name in self._names]
        outputs = [F.linear(F.linear(x_TI, pair.lora_A), pair.lora_B) * self._scale for pair in pairs]
        return self._join(dict(zip(self._names, outputs, strict=True)))

    def _join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join outputs, with zeros for targets without a pair."""
        if len(self._targets) == 1:
            return parts[self._targets[0]]
        like = next(iter(parts.values()))
        filled = [parts[t] if t in parts else like.new_zeros(*like.shape[:-1], self._widths[t]) for t in self._targets]
        if "q_proj" not in self._targets:
            return torch.cat(filled, dim=-1)
        grouped = [part.unflatten(-1, (self._key_heads, -1)) for part in filled]  # [..., G, R D], [..., G, D], [..., G, D]
        return torch.cat(grouped, dim=-1).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        matrix, axis = ("lora_B", 0) if self._cut == "rows" else ("lora_A", 1)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {f"{name}.{matrix}": axis for name in self._names},
            sharded_offsets, tp_group=self._group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        return sharded

    def _one(self, pair: Any, x: Tensor) -> Tensor:
        z, group = F.linear(x, pair.lora_A), self._group
        if self._cut == "rows" and self._sequence_parallel:
            z = gather_from_sequence_parallel_region(z, tensor_parallel_output_grad=True, group=group)
        elif self._cut == "rows":
            z = copy_to_tensor_model_parallel_region(z, group=group)
        elif self._sequence_parallel:
            z = reduce_scatter_to_sequence_parallel_region(z, group=group)
        else:
            z = reduce_from_tensor_model_parallel_region(z, group=group)
        return F.linear(z, pair.lora_B) * self._scale


def attach_adapters(model: Any, lora: LoraConfig) -> None:
    """Attach adapters without values; else only a scalar head stays trainable."""
    model.requires_grad_(False)
    if model.head == "scalar" and model.post_process:
        model.output_layer.weight.requires_grad_(True)
    for layer in model.decoder.layers:
        for product in PRODUCTS:
            if set(lora.projections).isdisjoint(product.targets):
                continue
            owner = layer.get_submodule(product.owner)
            linear = getattr(owner, product.linear)
            adapters = Adapters(model, product, lora, linear.weight)
            owner.add_module(f"{product.linear}_lora", adapters)
            linear.register_forward_hook(lambda _, args, out, a=adapters: (out[0] + a(args[0]), *out[1:]))
    model.adapters = lora


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def adapters_of(owner: Any, linear: str) -> Adapters | None:
    found = getattr(owner, f"{linear}_lora", None)
    assert found is None or isinstance(found, Adapters)
    return found
