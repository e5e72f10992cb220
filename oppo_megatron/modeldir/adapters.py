"""Checks that a peft directory's adapters match the settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oppo_megatron.config.explain import explain
from oppo_megatron.config.model import LoraConfig
from oppo_megatron.config.paths import missing_within
from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.megatron import read_mapping

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # others change the base weights
    **dict.fromkeys(
        ("alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)
    ),
}
"""Unsupported options of peft's LoRA, with the values that turn them off."""


def adapter_problems(name: str, lora: LoraConfig) -> list[str]:
    """Return a sentence per mismatch with the settings."""
    if lora.adapter is None:
        return []
    try:
        found = read_adapter_config(lora.adapter)
    except CheckpointError as error:
        return [f"{name}.adapter: {error}"]
    where = f"{name}.adapter `{lora.adapter}`"
    problems = _uncomputed(where, found)
    due = {"r": ("rank", lora.rank), "lora_alpha": ("alpha", lora.alpha)}
    problems += [
        f"{where}: its {theirs} is {found.get(theirs)!r:.40}, but {name}.{ours} is {value:g}; they must be equal"
        for theirs, (ours, value) in due.items()
        if found.get(theirs) != value
    ]
    targets = found.get("target_modules")
    if not isinstance(targets, list) or set(map(str, targets)) != set(lora.projections):
        shown = sorted(map(str, targets)) if isinstance(targets, list) else targets
        problems.append(
            f"{where}: its target_modules are {shown!r:.120}, but {name}.targets are {sorted(lora.projections)}; "
            "they must be equal"
        )
    return problems


def _uncomputed(where: str, found: Mapping[str, Any]) -> list[str]:
    return [
        f"{where}: its {option} is {found[option]!r:.60}, which is not computed here; merge it into its base with peft, or "
        "train it without"
        for option, plain in PLAIN.items()
        if option in found and found[option] not in plain
    ]


def lora_of(directory: Path) -> LoraConfig:
    """Read a peft directory's settings.  Raises CheckpointError if unsupported."""
    found = read_adapter_config(directory)
    try:
        lora = LoraConfig(
            rank=found.get("r"), alpha=found.get("lora_alpha"), targets=found.get("target_modules"), adapter=directory
        )
    except ValidationError as error:
        told = "; ".join(explain(LoraConfig, error))
        raise CheckpointError(f"`{directory / ADAPTER_CONFIG}` describes adapters that are not computed here ({told})") from error
    if problems := _uncomputed(f"`{directory}`", found):
        raise CheckpointError("\n".join(problems))
    return lora


def refuse_adapters(directory: Path) -> None:
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        raise CheckpointError(
            f"`{directory}` holds adapters, which are no model: name their base as the checkpoint and this as `lora.adapter`, or "
            f"merge them (`oppo convert BASE DST --adapter {directory}`)"
        )


def read_adapter_config(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_CONFIG
    for file in (path, directory / ADAPTER_WEIGHTS):
        if not file.is_file():
            raise CheckpointError(missing_within("the adapter's file (peft's, as safetensors)", file))
    content = read_mapping(path, "the adapter's settings")
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"`{path}`: peft_type is {kind!r:.40}, but LORA alone is computed; name an adapter of LoRA")
    return content
