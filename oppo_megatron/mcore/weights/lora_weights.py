"""Adapters: transfer between peft directories and one rank's parameters, and merging."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import PEFT, SCALAR_HEAD, Head, Part, adapter_parts
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.layout.stored_weights import adapter_problems, summary
from oppo_megatron.mcore.weights.hf_source import (
    DrawnSource,
    OverlaidSource,
    SafetensorsSource,
    TensorSource,
    stored_of,
)
from oppo_megatron.mcore.weights.hf_weights import Values, matching_params, put_part, write_gathered
from oppo_megatron.mcore.weights.hf_writer import write_tensors
from oppo_megatron.modeldir.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS

TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "scalar": "SEQ_CLS"}


class FreshAdapters(DrawnSource):
    """Initial adapters: A uniform within 1 / sqrt(inputs), as in peft; B zero."""

    def __init__(self, parts: Collection[Part], seed: int):
        super().__init__({part.hf_name: part.hf_shape for part in parts if ".lora_" in part.hf_name}, seed)

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)


def open_adapters(directory: Path, shape: ModelShape, lora: LoraConfig, head: Head) -> TensorSource:
    """Return a peft directory's tensors.  Raises CheckpointError unless they fit; a scalar head may be missing."""
    source = SafetensorsSource(directory, ADAPTER_WEIGHTS)
    if problems := adapter_problems(shape, lora, head, stored_of(source)):
        raise CheckpointError(f"{directory}: the adapters do not fit the model:\n{summary(problems)}")
    return source


def has_head(directory: Path) -> bool:
    return f"{PEFT}{SCALAR_HEAD}" in SafetensorsSource(directory, ADAPTER_WEIGHTS).names()


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
        if part.hf_name in source.names():
            put_part(params[part.param], part, source.read(part.hf_name, part.share(model.groups.tp_rank, tp)))


def export_adapters(
    chunks: Sequence[Any],
    directory: Path,
    base: Path | None,
    *,
    tp_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    extra_files: Iterable[Path] = (),
) -> None:
    """Write a model's adapters as a peft directory; otherwise as `export_weights`.  `base`: None if random."""
    first = chunks[0]
    lora, shape, head = first.adapters, first.shape, first.head
    assert lora is not None

    def parts_of(tp_size: int, stage: int, num_stages: int) -> list[Part]:
        return adapter_parts(shape, lora, head, tp_size=tp_size, pp_rank=stage, pp_size=num_stages)

    def write(values: Values) -> None:
        tensors = {part.hf_name: part.hf_shape for part in parts_of(1, 0, 1)}
        write_tensors(
            directory, tensors, values, peft_config(lora, head, base), next(first.parameters()).dtype,
            max_shard_bytes=sys.maxsize, extra_files=extra_files, names=(ADAPTER_CONFIG, ADAPTER_WEIGHTS),
        )  # fmt: skip

    write_gathered(chunks, parts_of, write, tp_group, pp_group, dp_group, whole=False)


def peft_config(lora: LoraConfig, head: Head, base: Path | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": TASKS[head],
        "base_model_name_or_path": "" if base is None else str(base.absolute()),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.projections),
        "modules_to_save": [SCALAR_HEAD.removesuffix(".weight")] if head == "scalar" else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


class MergedSource(OverlaidSource):
    """A model's tensors with W + s B A for each adapted W, and the adapters' scalar head."""

    def __init__(self, base: TensorSource, adapters: TensorSource, scale: float):
        head = PEFT + SCALAR_HEAD
        super().__init__(base, {SCALAR_HEAD: (adapters, head)} if head in adapters.names() else {})
        self._adapters, self._scale = adapters, scale

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        weight, pair = super().read(name, region), PEFT + name.removesuffix("weight")
        if f"{pair}lora_A.weight" not in self._adapters.names():
            return weight
        a, b = (self._adapters.read(f"{pair}lora_{m}.weight", (slice(None), slice(None))).float() for m in "AB")
        return (weight.float() + (b @ a)[region] * self._scale).to(weight.dtype)


def merged(base: TensorSource, shape: ModelShape, head: Head, lora: LoraConfig) -> MergedSource:
    """Merge the adapters of `lora.adapter`.  Raises CheckpointError if they do not fit."""
    assert lora.adapter is not None
    adapters = open_adapters(lora.adapter, shape, lora, head)
    return MergedSource(base, adapters, lora.scale)
