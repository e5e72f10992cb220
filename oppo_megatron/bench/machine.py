"""The machine at hand as a cluster of the planner: the speed of a core, what further cores bring a rank, messages of its ranks.

Measured for one model's shape in float32 or bfloat16: products as decoding calls them, and norms, rotations, activation and
sums one kernel after the other.  Times of kernels are the best of several tries (`peaks.py`), those of messages the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from oppo_megatron.bench.peaks import DTYPES, Products, best_s, measure_peaks, threads_of
from oppo_megatron.layout.flops import Shape, layer_linears
from oppo_megatron.layout.shape import head_dim, num_kv_heads
from oppo_megatron.processes import end_with_parent
from oppo_megatron.sim.clusters.gpus import GPUS, Gpu
from oppo_megatron.sim.clusters.links import INSIDE
from oppo_megatron.sim.laws.points import CollectivePoint, LayerPoint

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GAIN_TOKENS = (16, 64, 256, 1024)
"""Over which the gain of further threads is averaged, as a ratio."""
PAYLOADS = tuple(2**power for power in range(10, 25, 2))
CALLS, RUNS = 20, 15


@dataclass(frozen=True)
class Core:
    """Peaks of one core, and `threads`: how many times as fast so many cores compute a layer."""

    flops: float
    read_bytes: float
    threads: Mapping[int, float]


def measure_core(shape: Shape, dtype: str, cores: int) -> Core:
    """The peaks of one core, and what each further one brings to a model of this shape."""
    peaks = measure_peaks(shape, dtype, [max(TOKENS)], [1])
    rates = {count: _layer_rates(shape, dtype, count) for count in range(1, cores + 1)}
    gains = {
        count: prod(rate / alone for rate, alone in zip(own, rates[1], strict=True)) ** (1 / len(own))
        for count, own in rates.items()
    }
    return Core(peaks.flops_at(1), peaks.read_at(1), gains)


def measure_layers(name: str, shape: Shape, dtype: str) -> Iterator[LayerPoint]:
    """A layer on one core, for each number of tokens; `name`: of the processor."""
    with threads_of(1):
        products = Products(layer_linears(shape), DTYPES[dtype])
        for tokens in TOKENS:
            between = _Between(shape, tokens, DTYPES[dtype])
            yield LayerPoint(
                name, str(shape["model_type"]), shape, 1, tokens,
                products_us=1e6 * 2 * tokens * products.size / products.rate(tokens),
                elementwise_us=1e6 * best_s(between.all),
                add_us=1e6 * best_s(between.add),
            )  # fmt: skip


def exchange_messages(rank: int, ranks: int, meeting: str, name: str, found: Any) -> None:
    """One of `ranks` processes that meet at the file `meeting`: all-reduces of all, messages of the first two to and fro.

    The first puts the points in the queue `found`.
    """
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    points = list(_messages(rank, ranks, name))
    if rank == 0:
        found.put(points)
    dist.destroy_process_group()


def _messages(rank: int, ranks: int, name: str) -> Iterator[CollectivePoint]:
    for payload in PAYLOADS:
        values = torch.ones(payload // 4)
        reduced_s = _each_s(partial(dist.all_reduce, values))
        sent_s = _each_s(partial(_there_and_back, rank, values)) / 2
        yield CollectivePoint(name, "all_reduce", ranks, ranks, payload, 1e6 * reduced_s)
        yield CollectivePoint(name, "send_recv", 2, 2, payload, 1e6 * sent_s)


def processor(core: Core, cores: int) -> Gpu:
    """One core, with its share of the memory, and the constants of a core of which nothing is measured."""
    return replace(
        GPUS["cpu"], flops=core.flops, bytes_per_s=core.read_bytes, memory_bytes=psutil.virtual_memory().total / cores
    )


def cluster_tree(gpu: Gpu, cores: int, measured: str) -> dict[str, Any]:
    """The machine's cluster.yaml; `measured`: the file with the constants, beside it."""
    numbers = {
        "memory_gb": gpu.memory_bytes / 1e9, "tflops": gpu.flops / 1e12, "gb_per_s": gpu.bytes_per_s / 1e9, "like": "cpu",
    }  # fmt: skip
    line = INSIDE["cpu"].send
    links = {"alpha_us": 1e6 * line.alpha_s, "gb_per_s": line.peak / 1e9}  # for want of measured ones
    return {"nodes": 1, "gpus_per_node": cores, "gpu": numbers, "inside": links, "measured": measured}


class _Between:
    """What a layer does beside its products and attention, for `tokens` tokens."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype):
        heads, keys, width = shape["num_attention_heads"], num_kv_heads(shape), head_dim(shape)
        self.hidden, self.residual = (torch.randn(tokens, shape["hidden_size"], dtype=dtype) for _ in range(2))
        self.gate, self.up = (torch.randn(tokens, shape["intermediate_size"], dtype=dtype) for _ in range(2))
        self.rotated = [torch.randn(tokens, count, width, dtype=dtype) for count in (heads, keys)]
        self.cos, self.sin = (torch.randn(tokens, 1, width, dtype=dtype) for _ in range(2))

    def add(self) -> Tensor:
        return self.hidden + self.residual

    def all(self) -> None:
        """Two norms, rotations, activation, one sum."""
        for _ in range(2):
            F.rms_norm(self.hidden, self.hidden.shape[-1:])
        for values in self.rotated:
            first, second = values.chunk(2, dim=-1)
            torch.cat((-second, first), dim=-1).mul_(self.sin).add_(values * self.cos)
        F.silu(self.gate).mul_(self.up)
        self.add()


def _layer_rates(shape: Shape, dtype: str, threads: int) -> Sequence[float]:
    with threads_of(threads):
        products = Products(layer_linears(shape), DTYPES[dtype])
        return [products.rate(tokens) for tokens in GAIN_TOKENS]


def _there_and_back(rank: int, values: Tensor) -> None:
    for sender in (0, 1):
        if rank == sender:
            dist.send(values, 1 - sender)
        elif rank == 1 - sender:
            dist.recv(values, sender)


def _each_s(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks make together: the mean of several runs of calls, each begun together.

    The best run would be three times as fast, where threads have to be woken: a step of training has hundreds of messages,
    and takes as long as they do on average.
    """
    seconds = 0.0
    for _ in range(RUNS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds += time.perf_counter() - started
    return seconds / (RUNS * CALLS)
