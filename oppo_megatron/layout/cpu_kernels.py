"""Sizes and memory of a CPU's matrix products, for the memory plan and for `mcore/cpu.py`.  None of this applies to a GPU."""

from __future__ import annotations

FEW_ROWS, ROW_MULTIPLE, MOST_ROWS = 128, 32, 4096
"""Packed products take up to `FEW_ROWS` rows unpadded, more in multiples; above `MOST_ROWS` products are not packed."""
WHOLE_MULTIPLE = 64
"""Calls over whole sequences in bfloat16 on a CPU are padded to multiples of this number of rows, the output layer's included.
"""
KERNEL_BYTES, MOST_KERNELS = 2**19, 1024
"""Bytes that oneDNN keeps for a product of given sizes (two buffers of code, measured), and its largest number of products."""
WHOLE_KERNEL_BYTES = 2**20
"""The same for a product over whole sequences in bfloat16."""


def prefill_sizes(tokens: int) -> int:
    """How many numbers of rows packed products may meet in calls of up to `tokens` tokens, but for rare ones of few rows."""
    return max(0, -(-min(tokens, MOST_ROWS) // ROW_MULTIPLE) - FEW_ROWS // ROW_MULTIPLE)


def kernel_bytes(layer_sizes: int, head_sizes: int) -> int:
    """Bytes of a layer's four product kernels for `layer_sizes` row counts, and of the output layer's for `head_sizes`."""
    return min(4 * layer_sizes + head_sizes, MOST_KERNELS) * KERNEL_BYTES


def training_kernel_bytes(tokens: int) -> int:
    """Bytes of the kernels of an update in bfloat16 on a CPU, in micro-batches of up to `tokens` tokens.

    A layer's four products and the output layer's, each with its two gradients, for every number of rows.
    """
    sizes = -(-tokens // WHOLE_MULTIPLE)
    return min(3 * 5 * sizes, MOST_KERNELS) * WHOLE_KERNEL_BYTES
