"""Adapters: from peft directories to one rank's parameters, and merging."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import PEFT, SCALAR_HEAD, Head, Part, adapter_parts, adapter_problems, summary
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.hf_source import DrawnSource, OverlaidSource, SafetensorsSource, TensorSource
from oppo_megatron.mcore.weights.hf_weights import matching_params, put_part
from oppo_megatron.modeldir.adapters import ADAPTER_WEIGHTS


class FreshAdapters(DrawnSource):
    """Initial adapters: A uniform within 1 / sqrt(inputs), as in peft; B zero."""

    def __init__(self, parts: Collection[Part], seed: int):
        super().__init__({part.hf_name: part.hf_shape for part in parts if ".lora_" in part.hf_name}, seed)

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)


def open_adapters(directory: Path, shape: ModelShape, lora: LoraConfig, head: Head) -> TensorSource:
    """Return a peft directory's tensors.  Raises CheckpointError unless they fit."""
    source = SafetensorsSource(directory, ADAPTER_WEIGHTS)
    if problems := adapter_problems(shape, lora, head, source.tensors):
        raise CheckpointError(f"{directory}: the adapters do not fit the model:\n{summary(problems)}")
    return source


def has_head(directory: Path) -> bool:
    return f"{PEFT}{SCALAR_HEAD}" in SafetensorsSource(directory, ADAPTER_WEIGHTS).tensors


@torch.no_grad()
def fill_adapters(model: Any, lora: LoraConfig, seed: int) -> None:
    source: TensorSource
    if lora.adapter is None:
        source = FreshAdapters(adapter_parts(model.shape, lora, model.head), seed)
    else:
        source = open_adapters(lora.adapter, model.shape, lora, model.head)
    tp = model.groups.tp
    parts = adapter_parts(model.shape, lora, model.head, tp_size=tp, pp_rank=model.stage, pp_size=model.num_stages)
    params = matching_params(model, parts, tp, whole=False)
    for part in parts:
        if part.hf_name in source.tensors:
            put_part(params[part.param], part, source.read(part.hf_name, part.share(model.groups.tp_rank, tp)))


class MergedSource(OverlaidSource):
    """Adapted weights are W + s B A; a scalar head is the adapters'."""

    def __init__(self, base: TensorSource, adapters: TensorSource, scale: float):
        head = PEFT + SCALAR_HEAD
        super().__init__(base, {SCALAR_HEAD: (adapters, head)} if head in adapters.tensors else {})
        self._adapters, self._scale = adapters, scale

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        weight, pair = super().read(name, region), PEFT + name.removesuffix("weight")
        if f"{pair}lora_A.weight" not in self._adapters.tensors:
            return weight
        a, b = (self._adapters.read(f"{pair}lora_{m}.weight", (slice(None), slice(None))).float() for m in "AB")
        return (weight.float() + (b @ a)[region] * self._scale).to(weight.dtype)


def merged(base: TensorSource, shape: ModelShape, head: Head, lora: LoraConfig) -> MergedSource:
    """Merge `lora.adapter`.  Raises CheckpointError if it does not fit."""
    assert lora.adapter is not None
    adapters = open_adapters(lora.adapter, shape, lora, head)
    return MergedSource(base, adapters, lora.scale)
