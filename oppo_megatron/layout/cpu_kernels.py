"""Sizes and memory of a CPU's matrix products, for the memory plan and `mcore/cpu.py`."""

from __future__ import annotations

FEW_ROWS, ROW_MULTIPLE, MOST_ROWS = 128, 32, 4096
"""Packed products take up to `FEW_ROWS` rows unpadded, more in multiples, and none above `MOST_ROWS`."""
WHOLE_MULTIPLE = 64
"""Calls over whole sequences in bfloat16 on a CPU are padded to multiples of this number of rows."""
KERNEL_BYTES, MOST_KERNELS = 2**19, 1024
"""Bytes that oneDNN keeps per product of given sizes (measured), and its largest number of products."""
WHOLE_KERNEL_BYTES = 2**20
"""The same for a product over whole sequences in bfloat16."""


def prefill_sizes(tokens: int) -> int:
    """Row counts that packed products may meet in calls of up to `tokens` tokens, except rare ones of few rows."""
    return max(0, -(-min(tokens, MOST_ROWS) // ROW_MULTIPLE) - FEW_ROWS // ROW_MULTIPLE)


def kernel_bytes(layer_sizes: int, head_sizes: int) -> int:
    return min(4 * layer_sizes + head_sizes, MOST_KERNELS) * KERNEL_BYTES


def training_kernel_bytes(tokens: int) -> int:
    """A layer's four products and the output layer's, each with its two gradients, for every number of rows."""
    sizes = -(-tokens // WHOLE_MULTIPLE)
    return min(3 * 5 * sizes, MOST_KERNELS) * WHOLE_KERNEL_BYTES
