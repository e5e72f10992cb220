"""Published speeds of serving and training, to which no constant was fitted, and the laws of a layer.

Serving: NVIDIA/TensorRT-LLM, docs/source/performance.md, commit 138f96d (v0.6.1; first token v0.5), fixed batches in float16.
Training: mosaicml/llm-foundry, scripts/train/benchmarking/README.md, commit 061f2c7, FSDP in bfloat16.

Both fuse the sum before a norm into the norm, so one sum per layer is counted.  The law of training has neither communication
nor optimizer, the law of serving no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.published.tables import llama_shape
from oppo_megatron.layout.shape import Shape, causal_pairs
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Cluster
from oppo_megatron.sim.laws import WIDTH, Group, LayerLaw, LayerSizes, all_reduce_s

SUMS = 1


def _mpt(hidden: int, layers: int, heads: int) -> Shape:
    """Return MPT's sizes; its feed-forward of two matrices of 4 h counts as three of 8 h / 3."""
    return llama_shape(hidden, round(8 * hidden / 3), layers, heads, heads, 50368)


SHAPES: Mapping[str, Shape] = {
    "LLaMA 7B": llama_shape(4096, 11008, 32, 32, 32, 32000), "LLaMA 70B": llama_shape(8192, 28672, 80, 64, 8, 32000),
    "MPT 7b": _mpt(4096, 32, 32), "MPT 13b": _mpt(5120, 40, 40), "MPT 30b": _mpt(7168, 48, 56),
    "MPT 70b": _mpt(8192, 80, 64),
}  # fmt: skip


@dataclass(frozen=True)
class ServingPoint:
    """Output tokens/s per GPU of a fixed batch; with one output token, milliseconds to it."""

    gpu: str
    model: str
    batch: int
    tp: int
    input_tokens: int
    output_tokens: int
    measured: float


@dataclass(frozen=True)
class TrainingPoint:
    """Model operations over the peak, in percent, without recomputation."""

    gpu: str
    model: str
    gpus: int
    sequence_tokens: int
    micro_batch: int
    recompute: bool
    mfu_percent: float


SERVING = (
    ServingPoint("a100-80", "LLaMA 7B", 384, 1, 128, 128, 5586),
    ServingPoint("a100-80", "LLaMA 7B", 60, 1, 128, 2048, 1928),
    ServingPoint("a100-80", "LLaMA 7B", 52, 1, 2048, 128, 591),
    ServingPoint("a100-80", "LLaMA 7B", 64, 2, 2048, 2048, 782),
    ServingPoint("a100-80", "LLaMA 70B", 1280, 4, 128, 128, 670),
    ServingPoint("a100-80", "LLaMA 70B", 240, 4, 128, 2048, 525),
    ServingPoint("a100-80", "LLaMA 70B", 120, 4, 2048, 128, 79),
    ServingPoint("a100-80", "LLaMA 7B", 1, 1, 128, 1, 16),
    ServingPoint("a100-80", "LLaMA 7B", 1, 1, 2048, 1, 133),
    ServingPoint("a100-80", "LLaMA 70B", 1, 4, 128, 1, 47),
    ServingPoint("a100-80", "LLaMA 70B", 1, 4, 2048, 1, 377),
)
TRAINING = (
    TrainingPoint("a100-80", "MPT 7b", 8, 2048, 6, False, 64.23),
    TrainingPoint("a100-80", "MPT 7b", 8, 1024, 64, True, 58.01),
    TrainingPoint("a100-80", "MPT 13b", 8, 2048, 2, False, 59.57),
    TrainingPoint("a100-80", "MPT 13b", 8, 4096, 10, True, 57.62),
    TrainingPoint("a100-80", "MPT 30b", 8, 2048, 3, True, 55.30),
    TrainingPoint("a100-80", "MPT 70b", 64, 2048, 8, True, 53.33),
    TrainingPoint("h100", "MPT 7b", 8, 2048, 6, False, 46.44),
    TrainingPoint("h100", "MPT 13b", 8, 2048, 2, False, 39.79),
    TrainingPoint("h100", "MPT 13b", 8, 4096, 10, True, 41.60),
    TrainingPoint("h100", "MPT 30b", 32, 2048, 14, True, 43.92),
    TrainingPoint("h100", "MPT 70b", 64, 2048, 8, True, 42.57),
)


def serving_by_law(point: ServingPoint) -> float:
    """Return the law's value in the unit of `measured`."""
    prefill = _forward_s(point, point.batch * point.input_tokens, point.batch * causal_pairs(0, point.input_tokens))
    if point.output_tokens == 1:
        return 1e3 * prefill
    positions = range(point.input_tokens + 1, point.input_tokens + point.output_tokens)
    decode = sum(_forward_s(point, point.batch, 0, point.batch * position) for position in positions)
    return point.batch * point.output_tokens / (prefill + decode) / point.tp


def _forward_s(point: ServingPoint, tokens: float, pairs: float, cached: float = 0.0) -> float:
    """Return the seconds of a forward that gives one token per row."""
    shape, node = SHAPES[point.model], Cluster(1, 8, GPUS[point.gpu], INSIDE[point.gpu])
    law, sizes = LayerLaw(node.gpu), LayerSizes.of(shape, point.tp)
    layer = law.products_s(sizes, tokens) + law.elementwise_s(sizes, tokens, sums=SUMS)
    layer += law.attention_s(sizes, pairs) + law.cached_attention_s(sizes, cached)
    layer += 2 * all_reduce_s(node, Group(point.tp), WIDTH * shape["hidden_size"] * tokens)
    return float(shape["num_hidden_layers"] * layer + law.head_s(shape, point.tp, point.batch))


def training_by_law(point: TrainingPoint) -> float:
    """Return MFU in percent, with attention counted without its mask as llm-foundry does."""
    shape, law = SHAPES[point.model], LayerLaw(GPUS[point.gpu])
    tokens, sizes = float(point.micro_batch * point.sequence_tokens), LayerSizes.of(shape, 1)
    layer = law.products_s(sizes, tokens) + law.elementwise_s(sizes, tokens, sums=SUMS)
    layer += law.attention_s(sizes, point.micro_batch * causal_pairs(0, point.sequence_tokens))
    layers = shape["num_hidden_layers"]
    seconds = (4 if point.recompute else 3) * layers * layer + 3 * law.head_s(shape, 1, tokens)
    products = layers * sizes.product_flops(tokens) + 2 * shape["vocab_size"] * shape["hidden_size"] * tokens
    attention = 4 * layers * sizes.queries * tokens * point.sequence_tokens
    return float(100 * 3 * (products + attention) / seconds / law.gpu.flops)


def compared_with_laws() -> Iterator[dict[str, Any]]:
    """Yield a row for each point."""
    for serving in SERVING:
        unit = "ms to the first token" if serving.output_tokens == 1 else "tokens/s/GPU"
        sizes = f"batch {serving.batch}, tp {serving.tp}, {serving.input_tokens} + {serving.output_tokens} tokens"
        yield _comparison(serving.gpu, f"{serving.model}, {sizes}: {unit}", serving.measured, serving_by_law(serving))
    for training in TRAINING:
        sizes = f"{training.gpus} GPUs, {training.micro_batch} x {training.sequence_tokens} tokens"
        recomputed = ", recomputed" if training.recompute else ""
        what = f"{training.model}, {sizes}{recomputed}: MFU %"
        yield _comparison(training.gpu, what, training.mfu_percent, training_by_law(training))


def _comparison(gpu: str, what: str, measured: float, law: float) -> dict[str, Any]:
    return {"gpu": gpu, "what": what, "measured": measured, "law": law, "ratio": measured / law}
