"""Writes a Hugging Face directory with at most one tensor in memory.

safetensors: 8 bytes with a JSON header's length (little-endian), the header with dtype, shape and byte ranges, the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.clock import by_time
from oppo_megatron.config.model import LoraConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.families import classes_of
from oppo_megatron.layout.hf_layout import SCALAR_HEAD, Head
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.dist_source import CODES
from oppo_megatron.modeldir.headers import INDEX_FILE, SINGLE_FILE
from oppo_megatron.rundir.manifest import sync_folder

MAX_SHARD_BYTES = 2 << 30
_DROPPED_KEYS = ("torch_dtype", "quantization_config", "num_labels", "id2label", "label2id", "problem_type")


def require_empty(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty: weights are never overwritten. Remove or rename it.")


@contextlib.contextmanager
def whole_directory(directory: Path, extra_files: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield a folder that becomes `directory`, or nothing after an error.  Raises CheckpointError if it is not empty."""
    require_empty(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was stopped while it wrote
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in extra_files:
            shutil.copyfile(path, partial / path.name)
        for path in partial.rglob("*"):
            sync_folder(path)  # or a file
        sync_folder(partial)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(directory.parent)


def write_tensors(
    directory: Path, tensors: Mapping[str, tuple[int, ...]], values: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any], dtype: torch.dtype, *, max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Iterable[Path] = (), names: tuple[str, str] = ("config.json", SINGLE_FILE),
) -> None:  # fmt: skip
    """Write a directory, whole or not at all: `values` ordered as `tensors`; `names`: files of config and single shard."""
    shards = _plan_shards(tensors, dtype.itemsize, max_shard_bytes, names[1])
    coming, progress, number = iter(values), by_time(), 0
    with whole_directory(directory, extra_files) as partial:
        for shard, held in shards.items():
            with (partial / shard).open("wb") as file:
                file.write(_header({name: tensors[name] for name in held}, dtype))
                for name in held:
                    found, tensor = next(coming)
                    assert (found, tuple(tensor.shape)) == (name, tensors[name]), (found, tensor.shape, name)
                    flat = tensor.detach().to("cpu", dtype).contiguous().flatten()
                    file.write(flat.view(torch.uint8).numpy().data)
                    number += 1
                    progress(f"{directory}: {number} of {len(tensors)} tensors written")
        if len(shards) > 1:
            size = sum(map(prod, tensors.values())) * dtype.itemsize
            weight_map = {name: shard for shard, held in shards.items() for name in held}
            _write_json(partial / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _write_json(partial / names[0], config)


def _header(tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in tensors.items():
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(json.dumps(content, indent=2).encode() + b"\n")


def hf_config(shape: ModelShape, head: Head, dtype: torch.dtype) -> dict[str, Any]:
    config = {key: value for key, value in shape.hf.items() if key not in _DROPPED_KEYS}
    config["architectures"] = [classes_of(shape.family)[head == "scalar"]]
    config["dtype"] = str(dtype).removeprefix("torch.")
    if head == "scalar":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "scalar": "SEQ_CLS"}


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


def _plan_shards(tensors: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int, single: str) -> dict[str, Sequence[str]]:
    shards, size = list[list[str]](), 0
    for name, shape in tensors.items():
        num_bytes = prod(shape) * itemsize
        if not shards or size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    if len(shards) == 1:
        return {single: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}
