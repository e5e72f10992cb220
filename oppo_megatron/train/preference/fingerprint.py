"""What a reference is made from, as one checksum: where it is another, its log-probs are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.config.lora import LoraConfig
from oppo_megatron.config.model import LearningModelConfig, ModelConfig
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.manifest import describe, list_files

WEIGHTS = (".safetensors", ".distcp", ".pt")
NAMES = ("config.json", "adapter_config.json", ".metadata", "metadata.json")


def reference_fingerprint(model: ModelConfig) -> str:
    """SHA-256 of the model's shape, type and weights; of a model with adapters, of those that it begins with, too.

    Every rank makes the call, reads a share of the files, and gets the same.  Fresh adapters add nothing to a model's outputs.
    """
    lora = model.lora if isinstance(model, LearningModelConfig) else None
    known: dict[str, Any] = {"dtype": model.dtype, "shape": read_hf_config(model)}
    if model.checkpoint is None:
        known["seed"] = model.init_seed
    else:
        known["weights"] = _checksums(model.checkpoint)
    if lora is not None and lora.adapter is not None:
        known["adapter"] = _checksums(lora.adapter), _of_adapters(lora)
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _of_adapters(lora: LoraConfig) -> list[Any]:
    return [lora.rank, lora.alpha, lora.projections]


def _checksums(folder: Path) -> list[tuple[str, str]]:
    """Name and SHA-256 of each file of weights and of what says how they are read, in the order of names."""
    names = [name for name in list_files(folder) if Path(name).suffix in WEIGHTS or Path(name).name in NAMES]
    mine = {name: describe(folder / name).sha256 for name in names[dist.get_rank() :: dist.get_world_size()]}
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return sorted((name, checksum) for part in parts for name, checksum in part.items())
