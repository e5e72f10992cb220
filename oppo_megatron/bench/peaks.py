"""The machine that figures are measured on: its description, and its peaks in matrix products and reading memory.

A peak is the best of several tries, on one thread or on several: other work on the machine can only make a try slower.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

from oppo_megatron.cores import processor, usable_cores
from oppo_megatron.layout.cpu_kernels import MOST_ROWS
from oppo_megatron.layout.flops import Linear, Shape, head_linear, layer_linears
from oppo_megatron.mcore.cpu.prepacked import can_prepack, product

SQUARES = (512, 1024, 2048)
LARGE_BYTES = 256 * 2**20
TRY_S, MIN_TRIES = 0.2, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Peaks:
    """Operations and bytes a second by number of threads.

    `flops` is the best rate of any product; `decode_flops[threads][sequences]` that of a model's products over so many
    tokens, as decoding calls them, one matrix after the other.
    """

    dtype: str
    flops: Mapping[int, float]
    read_bytes: Mapping[int, float]
    decode_flops: Mapping[int, Mapping[int, float]]

    def flops_at(self, threads: int) -> float:
        """The best rate with at most `threads` threads: more of them are no slower than fewer, on a quiet machine."""
        return max(rate for count, rate in self.flops.items() if count <= threads)

    def read_at(self, threads: int) -> float:
        """The best rate of reading with at most `threads` threads."""
        return max(rate for count, rate in self.read_bytes.items() if count <= threads)

    def decode_at(self, threads: int, sequences: int) -> float:
        """Operations a second over so many sequences, from those measured (straight lines over the logarithm)."""
        sizes = sorted(next(iter(self.decode_flops.values())))
        counts = [count for count in self.decode_flops if count <= threads]
        rates = [max(self.decode_flops[count][size] for count in counts) for size in sizes]
        return float(np.interp(np.log(sequences), np.log(sizes), rates))

    def tree(self) -> dict[str, Any]:
        """As JSON takes it, in 10^9 a second."""
        giga = {
            name: {str(threads): rate / 1e9 for threads, rate in getattr(self, name).items()}
            for name in ("flops", "read_bytes")
        }
        decode = {
            str(threads): {str(size): rate / 1e9 for size, rate in rates.items()}
            for threads, rates in self.decode_flops.items()
        }
        return {
            "dtype": self.dtype,
            "gemm_gflops": giga["flops"],
            "read_gbytes": giga["read_bytes"],
            "decode_gemm_gflops": decode,
        }


def measure_peaks(shape: Shape, dtype: str, batches: Sequence[int], threads: Sequence[int]) -> Peaks:
    """Measure on the CPU with each number of threads: square products, products of `shape` over each of `batches` tokens,
    and reading a large buffer and one as large as the model (which caches may serve faster)."""
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
    """Those of a decode step, in their order."""
    return layer_linears(shape) * shape["num_hidden_layers"] + [head_linear(shape, scalar=False)]


class Products:
    """The products of `linears`, one after the other, with random weights of their own."""

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype):
        weights = [torch.randn(linear.out, linear.into, dtype=dtype) for linear in linears]
        self.dtype, self.size = dtype, sum(linear.size for linear in linears)
        self.num_bytes = self.size * dtype.itemsize
        self._calls = [(weight.shape[1], product(weight, packed=can_prepack(weight))) for weight in weights]

    def rate(self, batch: int) -> float:
        """Operations a second over `batch` tokens."""
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
    """Bytes a second of the faster of two kernels that read a buffer once and write nothing."""
    buffer = torch.ones(max(1, num_bytes // 4))
    return 4 * buffer.numel() / min(best_s(buffer.sum), best_s(lambda: torch.dot(buffer, buffer)))


def best_s(call: Callable[[], object]) -> float:
    """Seconds of the fastest call; the first, which warms up, does not count."""
    call()
    best, tries, until = float("inf"), 0, time.perf_counter() + TRY_S
    while tries < MIN_TRIES or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        best, tries = min(best, time.perf_counter() - started), tries + 1
    return best


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


PACKAGES = ("torch", "megatron-core", "transformers")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, devices, versions, and the current load."""
    cores = usable_cores()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": processor()[1] or platform.machine(),
        "usable_cores": cores,
        "cuda_devices": devices,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
