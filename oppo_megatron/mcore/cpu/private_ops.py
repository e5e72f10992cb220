"""Checks, before a run starts, the undocumented operations of torch that the CPU paths call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oppo_megatron.config.model import Dtype, RuntimeConfig
from oppo_megatron.errors import ConfigError

PACKING = ("mkldnn._reorder_linear_weight", "mkldnn._linear_pointwise", "mkldnn._is_mkldnn_bf16_supported")
HALF_ATTENTION = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
)


@dataclass(frozen=True)
class Need:
    """Operations that a setting needs, and the alternative."""

    setting: str
    instead: str
    names: tuple[str, ...]


def needs(runtime: RuntimeConfig, dtypes: set[Dtype]) -> list[Need]:
    """Operations that a run on a CPU calls."""
    found = []
    if runtime.decode_path == "packed" and torch.backends.mkldnn.is_available():
        found.append(Need("runtime.decode_path packed", "set it to fused", PACKING))
    if "bfloat16" in dtypes:
        found.append(Need("bfloat16 on a CPU", "set runtime.dtype to float32", HALF_ATTENTION))
    return found


def require_private_ops(runtime: RuntimeConfig, dtypes: set[Dtype]) -> None:
    """Raises ConfigError, naming each operation that this torch lacks."""
    problems = [
        f"{need.setting} calls torch.ops.{name}, which torch {torch.__version__} does not have; {need.instead}, or install "
        "another torch, 2.6 or newer"
        for need in needs(runtime, dtypes)
        for name in need.names
        if not _there(name)
    ]
    if problems:
        raise ConfigError(problems)


def _there(name: str) -> bool:
    namespace, _, operation = name.partition(".")
    return hasattr(getattr(torch.ops, namespace), operation)
