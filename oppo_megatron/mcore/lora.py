"""Low-rank adapters of megatron-core's parallel products: y = W x + s B A x (Hu et al. 2021), a pair per Hugging Face target.

A column-parallel product has a whole A and B cut by rows; the gradient of B's input is summed over ranks.  A row-parallel one
has A cut by columns and a whole B; B A x is summed with the product (cached calls), or A x is (training).
Legend: T packed tokens, I inputs, G key/value heads, R query heads of each, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
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
from oppo_megatron.layout.hf_layout import PRODUCTS, pair_sizes
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.layers import tag_parameter

Join = Callable[[Mapping[str, Tensor]], Tensor]


class Pair(torch.nn.Module):
    def __init__(self, sizes: tuple[tuple[int, int], tuple[int, int]], cut: Literal["rows", "columns"], like: Tensor):
        """`sizes` of A and B on this rank; `cut`: B by rows, or A by columns."""
        super().__init__()
        (rank, inputs), (outputs, _) = sizes
        self.lora_A = torch.nn.Parameter(like.new_empty(rank, inputs))
        self.lora_B = torch.nn.Parameter(like.new_empty(outputs, rank))
        sharded, dim = (self.lora_B, 0) if cut == "rows" else (self.lora_A, 1)
        set_tensor_model_parallel_attributes(sharded, True, dim, 1)

    @property
    def whole(self) -> torch.nn.Parameter:
        return self.lora_A if getattr(self.lora_B, "tensor_model_parallel", False) else self.lora_B


class Adapters(torch.nn.Module):
    def __init__(
        self,
        pairs: Mapping[str, Pair],
        cut: Literal["rows", "columns"],
        join: Join,
        scale: float,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ):
        super().__init__()
        for name, pair in pairs.items():
            self.add_module(name, pair)
            if sequence_parallel:
                tag_parameter(pair.whole, "sequence_parallel", True)
        self._names, self._cut, self._join, self._scale = list(pairs), cut, join, scale
        self._group, self._sequence_parallel = group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self._join({name: self._one(self.get_submodule(name), x) for name in self._names})

    def cached(self, x_TI: Tensor) -> Tensor:
        """Return the addition before sums over tensor ranks."""
        pairs: list[Any] = [self.get_submodule(name) for name in self._names]
        outputs = [F.linear(F.linear(x_TI, pair.lora_A), pair.lora_B) * self._scale for pair in pairs]
        return self._join(dict(zip(self._names, outputs, strict=True)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        matrix, axis = ("lora_B", 0) if self._cut == "rows" else ("lora_A", 1)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {f"{name}.{matrix}": axis for name in self._names},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
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
    """Attach adapters, values not yet set, to a RoleModel; otherwise only a scalar head stays trainable."""
    model.requires_grad_(False)
    if model.head == "scalar" and model.post_process:
        model.output_layer.weight.requires_grad_(True)
    for layer in model.decoder.layers:
        for product in PRODUCTS:
            targets = [target for target in product.targets if target in lora.projections]
            if not targets:
                continue
            owner = layer.get_submodule(product.owner)
            linear = getattr(owner, product.linear)
            sizes = pair_sizes(model.shape, lora.rank, model.groups.tp)
            pairs: dict[str, Pair] = {target: Pair(sizes[target], product.cut, linear.weight) for target in targets}
            join = _join(product.targets, model.shape, model.groups.tp)
            group, sequence_parallel = model.groups.collection.tp, bool(model.config.sequence_parallel)
            adapters = Adapters(pairs, product.cut, join, lora.scale, group, sequence_parallel)
            owner.add_module(f"{product.linear}_lora", adapters)
            linear.register_forward_hook(lambda _, args, out, a=adapters: (out[0] + a(args[0]), *out[1:]))
    model.adapters = lora


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def adapters_of(owner: Any, linear: str) -> Adapters | None:
    found = getattr(owner, f"{linear}_lora", None)
    assert found is None or isinstance(found, Adapters)
    return found


def _join(targets: Sequence[str], shape: ModelShape, tp: int) -> Join:
    """Join the targets' outputs into the product's, with zeros for targets without a pair."""
    if len(targets) == 1:
        return lambda parts: parts[targets[0]]
    sizes = pair_sizes(shape, 1, tp)
    widths = {target: sizes[target][1][0] for target in targets}

    def filled(parts: Mapping[str, Tensor]) -> list[Tensor]:
        like = next(iter(parts.values()))
        return [parts[t] if t in parts else like.new_zeros(*like.shape[:-1], widths[t]) for t in targets]

    if "q_proj" not in targets:
        return lambda parts: torch.cat(filled(parts), dim=-1)
    groups = shape.num_kv_heads // tp

    def by_group(parts: Mapping[str, Tensor]) -> Tensor:
        grouped = [part.unflatten(-1, (groups, -1)) for part in filled(parts)]  # [..., G, R D], [..., G, D], [..., G, D]
        return torch.cat(grouped, dim=-1).flatten(-2)

    return by_group
