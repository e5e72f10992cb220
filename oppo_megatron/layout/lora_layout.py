"""The place of each tensor of a peft directory in a megatron-core model.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.layout.hf_layout import SCALAR_HEAD, Head, Part
from oppo_megatron.layout.model_shape import ModelShape

PEFT = "base_model.model."


@dataclass(frozen=True)
class Product:
    """A product of a layer, Hugging Face's projections in it, and how tensor ranks cut their adapters."""

    owner: str
    linear: str
    hf_owner: str
    targets: tuple[str, ...]
    cut: Literal["rows", "columns"]


PRODUCTS = (
    Product("self_attention", "linear_qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), "rows"),
    Product("self_attention", "linear_proj", "self_attn", ("o_proj",), "columns"),
    Product("mlp", "linear_fc1", "mlp", ("gate_proj", "up_proj"), "rows"),
    Product("mlp", "linear_fc2", "mlp", ("down_proj",), "columns"),
)


def pair_sizes(shape: ModelShape, rank: int, tp: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """(rows, columns) of A and of B on one tensor rank, by target."""
    whole = _whole_sizes(shape)
    cut = {target: product.cut for product in PRODUCTS for target in product.targets}
    return {
        target: (
            (rank, inputs // tp if cut[target] == "columns" else inputs),
            (outputs // tp if cut[target] == "rows" else outputs, rank),
        )
        for target, (outputs, inputs) in whole.items()
    }


def adapter_parts(
    shape: ModelShape, lora: LoraConfig, head: Head, *, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> list[Part]:
    """Every tensor of a peft directory that one stage has a share of; on the last with a scalar head, that too."""
    per_stage = shape.num_layers // pp_size
    sizes = _whole_sizes(shape)
    parts = []
    for layer in range(per_stage):
        for product in PRODUCTS:
            for target in (target for target in product.targets if target in lora.projections):
                hf = f"{PEFT}model.layers.{pp_rank * per_stage + layer}.{product.hf_owner}.{target}."
                ours = f"decoder.layers.{layer}.{product.owner}.{product.linear}_lora.{target}."
                outputs, inputs = sizes[target]
                cut_a, cut_b = (None, 0) if product.cut == "rows" else (1, None)
                rows_b = outputs if cut_b is None else outputs // tp_size
                rank = lora.rank
                parts += [
                    Part(f"{hf}lora_A.weight", (rank, inputs), cut_a, f"{ours}lora_A", (slice(0, rank),)),
                    Part(f"{hf}lora_B.weight", (outputs, rank), cut_b, f"{ours}lora_B", (slice(0, rows_b),)),
                ]
    if head == "scalar" and pp_rank == pp_size - 1:
        size = (1, shape.hidden_size)
        parts.append(Part(f"{PEFT}{SCALAR_HEAD}", size, None, "output_layer.weight", (slice(0, 1),)))
    return parts


def _whole_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each projection."""
    hidden, ffn, dim = shape.hidden_size, shape.ffn_size, shape.head_dim
    queries, keys = shape.num_heads * dim, shape.num_kv_heads * dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
