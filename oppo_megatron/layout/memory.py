"""A model's share of a rank's memory, exact except for activations and a CPU's kernels.

Not counted: libraries, device context, NCCL's buffers, a guard's host copy, allocator loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oppo_megatron.config.model import KVLayout, LoraConfig, TrainingLayoutConfig
from oppo_megatron.layout.experts import experts_of
from oppo_megatron.layout.families import is_tied, ropes, rotary_dim, traits
from oppo_megatron.layout.layouts import HasSizes, vocab_rows
from oppo_megatron.layout.shape import (
    DTYPE_BYTES,
    ROWS_OF_SUMS,
    Shape,
    head_dim,
    kv_bytes_per_token,
    layer_linears,
    layer_weights,
    norm_weights,
    projections,
)

FP32 = 4
BLOCK_TOKENS = 256
"""Positions per block of a paged cache: FlashAttention-2's minimum."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank. `copy`: weights in another layout for training; `packed`: for a CPU; `buffers`: rotary, gathering."""

    weights: float = 0
    copy: float = 0
    packed: float = 0
    kernels: float = 0
    gradients: float = 0
    optimizer: float = 0
    kv_cache: float = 0
    buffers: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    @property
    def lasting(self) -> float:
        """Bytes held between updates on any processor."""
        return self.weights + self.copy + self.gradients + self.optimizer + self.kv_cache + self.buffers

    @classmethod
    def of_rank(cls, roles: Sequence[Memory]) -> Memory:
        """Sum of roles, but the largest activations and kernels, because roles compute in turn."""
        kinds = [vars(memory) for memory in roles]
        sums = {kind: sum(memory[kind] for memory in kinds) for kind in kinds[0]}
        return cls(**sums | {kind: max(memory[kind] for memory in kinds) for kind in ("kernels", "activations")})


def stage_layers(shape: Shape, pp: int, stage: int, vpp: int = 1) -> list[range]:
    """Layers (from 0) of a pipeline stage, a range per virtual stage."""
    size = shape["num_hidden_layers"] // (pp * vpp)
    return [range(first, first + size) for first in ((chunk * pp + stage) * size for chunk in range(vpp))]


def stage_parameters(shape: Shape, tp: int, pp: int, stage: int, *, scalar: bool, ep: int = 1) -> int:
    hidden, embedding = shape["hidden_size"], vocab_rows(shape["vocab_size"], tp) * shape["hidden_size"]
    layer = layer_weights(shape) // tp + norm_weights(shape, tp)
    row, experts = traits(shape), experts_of(shape)
    if row.qkv_bias:
        sizes = projections(shape)
        layer += sum(sizes[name][0] for name in ("q_proj", "k_proj", "v_proj")) // tp  # biases
    if row.sinks:
        layer += shape["num_attention_heads"] // tp
    if experts is not None:
        layer += experts.count * hidden  # the router
        layer -= expert_weights(shape) // tp - expert_weights(shape) // (tp * ep)
        if row.biased:  # of the output projection, the router and the experts
            layer += hidden + experts.count + experts.count // (tp * ep) * (2 * experts.ffn_size + hidden)
    count = shape["num_hidden_layers"] // pp * layer
    if stage == 0:
        count += embedding
    if stage == pp - 1:
        shared = is_tied(shape) and pp == 1  # two stages keep a copy each
        head = hidden if scalar else 0 if shared else embedding
        count += hidden + head  # the last norm
    return int(count)


def expert_weights(shape: Shape) -> int:
    """Weights of a layer's experts."""
    return 0 if experts_of(shape) is None else sum(each.size for each in layer_linears(shape)[2:])


def adapter_parameters(shape: Shape, tp: int, pp: int, lora: LoraConfig) -> int:
    size, sizes = 0, projections(shape)
    for target in lora.projections:
        outputs, inputs = sizes[target]
        size += outputs + inputs // tp if target in ROWS_OF_SUMS else outputs // tp + inputs
    return int(shape["num_hidden_layers"] // pp * lora.rank * size)


def packed_parameters(shape: Shape, tp: int, pp: int, stage: int, *, scalar: bool) -> int:
    """Parameters in products, including the vocabulary's, tied or not."""
    head = vocab_rows(shape["vocab_size"], tp) * shape["hidden_size"] if stage == pp - 1 and not scalar else 0
    layer = layer_weights(shape) - expert_weights(shape)  # those are not packed
    return int(shape["num_hidden_layers"] // pp * (layer // tp) + head)


def optimizer_bytes(dtype: str) -> int:
    """Bytes of Adam's moments of a parameter and, for bfloat16, of its float32 weight."""
    return 2 * FP32 + (FP32 if dtype == "bfloat16" else 0)


def training_state(num_parameters: int, dtype: str, dp: int) -> Memory:
    """Float32 main gradients, and the optimizer's share of a replica."""
    return Memory(gradients=num_parameters * FP32, optimizer=num_parameters * optimizer_bytes(dtype) / dp)


def slot_tokens(context: int, kv_layout: KVLayout) -> int:
    """Cache positions per sequence; whole blocks if paged."""
    return -(-context // BLOCK_TOKENS) * BLOCK_TOKENS if kv_layout == "paged" else context


def kv_slots(shape: Shape, layout: HasSizes, dtype: str, *, slots: int, context: int, budget_mb: float | None) -> int:
    if budget_mb is None:
        return slots
    return min(slots, int(budget_mb * 2**20) // (context * kv_bytes_per_token(shape, layout, dtype)))


def table_bytes(shape: Shape, context: int) -> int:
    return 2 * context * rotary_dim(shape, head_dim(shape)) * FP32 * len(ropes(shape))


def gather_bytes(shape: Shape, dtype: str, train: TrainingLayoutConfig, tp: int, tokens: int) -> int:
    """megatron-core's persistent buffer for gathered activations (unused with frozen weights)."""
    gathers = train.sequence_parallel and tp > 1
    return tokens * int(shape["hidden_size"]) * DTYPE_BYTES[dtype] if gathers else 0


def shortage(lasting: Sequence[float], available: int, who: str, where: str) -> str | None:
    if sum(lasting) <= available:
        return None
    return (
        f"weights, gradients, optimizer and KV caches of {who} take {sum(lasting) / 2**30:,.1f} GiB on {where}, which has "
        f"{available / 2**30:,.1f} GiB of memory: the run's `--dry-run` shows what takes it; use smaller models, more machines "
        "or lower rollout.batch_size, overlap.delta.max or runtime.kv_cache_mb"
    )


FEW_ROWS, ROW_MULTIPLE, MOST_ROWS = 128, 32, 4096
"""Packed products have up to `FEW_ROWS` rows unpadded, then multiples up to `MOST_ROWS`."""
WHOLE_MULTIPLE = 64
"""Row padding of bfloat16 calls over whole sequences on a CPU."""
KERNEL_BYTES, MOST_KERNELS = 2**19, 1024
"""Bytes that oneDNN keeps per product size (measured), and the most products that it keeps."""
WHOLE_KERNEL_BYTES = 2**20
"""Bytes per product over whole sequences in bfloat16."""


def training_kernel_bytes(tokens: int) -> int:
    """A layer's four products and the head's two widths, with two gradients each, for every row count."""
    sizes = -(-tokens // WHOLE_MULTIPLE)
    return min(3 * 6 * sizes, MOST_KERNELS) * WHOLE_KERNEL_BYTES
