"""Peaks of this machine's processor in matrix products and in reading memory, on one thread or several.

A peak is the best of several tries, because other work on the machine can only make a try slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from oppo_megatron.layout.memory import MOST_ROWS
from oppo_megatron.layout.shape import Linear, Shape, head_linear, layer_linears
from oppo_megatron.mcore.cpu import can_prepack, product

SQUARES = (512, 1024, 2048)
LARGE_BYTES = 256 * 2**20
TRY_S, MIN_TRIES = 0.2, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Peaks:
    """Operations/s and bytes/s by number of threads.

    `flops` is the best rate of any product; `decode_flops[threads][sequences]` the rate of a model's products over that many
    tokens, one matrix after the other as in decoding.
    """

    dtype: str
    flops: Mapping[int, float]
    read_bytes: Mapping[int, float]
    decode_flops: Mapping[int, Mapping[int, float]]

    def flops_at(self, threads: int) -> float:
        """Return the best rate with at most `threads` threads."""
        return max(rate for count, rate in self.flops.items() if count <= threads)

    def read_at(self, threads: int) -> float:
        """Return the best rate of reading with at most `threads` threads."""
        return max(rate for count, rate in self.read_bytes.items() if count <= threads)

    def decode_at(self, threads: int, sequences: int) -> float:
        """Return operations/s over `sequences` tokens, interpolated linearly over the logarithm."""
        sizes = sorted(next(iter(self.decode_flops.values())))
        counts = [count for count in self.decode_flops if count <= threads]
        rates = [max(self.decode_flops[count][size] for count in counts) for size in sizes]
        return float(np.interp(np.log(sequences), np.log(sizes), rates))

    def lines(self) -> list[str]:
        """Return the peaks in words, in 10^9 per second."""
        return [
            f"{threads} thread(s), {self.dtype}: GEMM {self.flops[threads] / 1e9:.0f} GFLOP/s, read "
            f"{self.read_bytes[threads] / 1e9:.1f} GB/s, GEMM over "
            + ", ".join(f"{size} tokens {rate / 1e9:.0f}" for size, rate in rates.items())
            for threads, rates in self.decode_flops.items()
        ]


def measure_peaks(shape: Shape, dtype: str, batches: Sequence[int], threads: Sequence[int]) -> Peaks:
    """Measure with each number of threads: square products, products of `shape` over each of `batches` tokens, and reading a
    large buffer and one of the model's size (which caches may serve faster)."""
    flops, read, decode = {}, {}, {}
    for count in threads:
        with threads_of(count):
            model = Products(all_linears(shape), DTYPES[dtype])
            rates = {batch: model.rate(batch) for batch in {*batches, MOST_ROWS}}
            decode[count] = {batch: rates[batch] for batch in batches}
            flops[count] = max(*rates.values(), *(_square(size, DTYPES[dtype]) for size in SQUARES))
            read[count] = max(_read(size) for size in (LARGE_BYTES, model.num_bytes))
    return Peaks(dtype, flops, read, decode)


def all_linears(shape: Shape) -> list[Linear]:
    """Return the products of a decode step in order."""
    return layer_linears(shape) * shape["num_hidden_layers"] + [head_linear(shape, scalar=False)]


class Products:
    """The products of `linears`, one after the other, with random weights."""

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype):
        weights = [torch.randn(linear.out, linear.into, dtype=dtype) for linear in linears]
        self.dtype, self.size = dtype, sum(linear.size for linear in linears)
        self.num_bytes = self.size * dtype.itemsize
        self._calls = [(weight.shape[1], product(weight, packed=can_prepack(weight))) for weight in weights]

    def rate(self, batch: int) -> float:
        """Return operations/s over `batch` tokens."""
        inputs = {width: torch.randn(batch, width, dtype=self.dtype) for width, _ in self._calls}

        def step() -> None:
            for width, call in self._calls:
                call(inputs[width])

        return 2 * batch * self.size / best_s(step)


def _square(size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    out = torch.empty(size, size, dtype=dtype)
    return 2 * size**3 / best_s(lambda: torch.mm(a, b, out=out))


def _read(num_bytes: int) -> float:
    """Return bytes/s of the faster of two kernels that read a buffer once and write nothing."""
    buffer = torch.ones(max(1, num_bytes // 4))
    return 4 * buffer.numel() / min(best_s(buffer.sum), best_s(lambda: torch.dot(buffer, buffer)))


def best_s(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call; the first one warms up."""
    call()
    best, tries, until = float("inf"), 0, time.perf_counter() + TRY_S
    while tries < MIN_TRIES or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        best, tries = min(best, time.perf_counter() - started), tries + 1
    return best


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Compute with `count` threads and without gradients in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
