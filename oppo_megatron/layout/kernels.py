"""Libraries of each part of a run, and why not a faster one.

megatron-core chooses optimizers and gradient norms in this order (optimizer/__init__.py, optimizer/clip_grads.py).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from textwrap import shorten
from typing import Literal

LayerKind = Literal["torch", "transformer_engine"]
TE, APEX, FLASH, TRITON = "transformer-engine", "apex", "flash-attn", "triton"
ABSENT, ON_CUDA_ONLY = "is not installed", "it computes on CUDA devices only"
USED = {
    TE: (
        "transformer_engine.pytorch:Linear",
        "transformer_engine.pytorch:DotProductAttention",
        "transformer_engine.pytorch.fp8:FP8GlobalStateManager",
        "transformer_engine.pytorch.optimizers:FusedAdam",
    ),
    APEX: ("apex.optimizers:FusedAdam", "amp_C:multi_tensor_l2norm"),
    FLASH: ("flash_attn:flash_attn_varlen_func", "flash_attn:flash_attn_with_kvcache"),
    TRITON: ("triton:jit", "triton.language:dot"),
}
"""Imported, because flash-attn 4 lacks them, PyPI's `apex` is another package, and builds for another torch fail then."""


@dataclass(frozen=True)
class Available:
    transformer_engine: str | None = None
    apex: str | None = None
    flash_attn: str | None = None
    triton: str | None = None
    cuda: bool = False
    faults: Mapping[str, str] = field(default_factory=dict)

    def fault(self, library: str) -> str:
        return f"{library} {self.faults.get(library, ABSENT)}"


@dataclass(frozen=True)
class Kernels:
    part: str
    used: str
    lacking: str | None = None


@cache
def import_fault(*names: str) -> str | None:
    """Reason why one of the names (`module:name` or a module) cannot be imported; None if all can."""
    root = names[0].partition(".")[0].partition(":")[0]
    for each in names:
        module, _, name = each.partition(":")
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                raise ImportError(f"{module} is {getattr(found, '__file__', None) or [*found.__path__][0]}, without it")
        except Exception as error:  # an incompatible binary may raise anything
            if isinstance(error, ModuleNotFoundError) and error.name == root:
                return ABSENT
            told = shorten(str(error), 200, placeholder=" ...")
            return f"cannot be used: importing `{each}` fails ({type(error).__name__}: {told})"
    return None


def usable(library: str) -> bool:
    """True if it can be imported; warns if it is installed but cannot."""
    fault = import_fault(*USED[library])
    if fault not in (None, ABSENT):
        warnings.warn(f"{library} {fault}; the run continues without it", stacklevel=2)
    return fault is None


def find_available(cuda: bool, fault_of: Callable[..., str | None] = import_fault) -> Available:
    """Without CUDA none is imported."""
    if not cuda:
        return Available()
    faults = {library: fault for library, names in USED.items() if (fault := fault_of(*names)) is not None}

    def version(library: str) -> str | None:
        if library in faults:
            return None
        try:
            return metadata.version(library)
        except metadata.PackageNotFoundError:
            return "of unknown version"

    return Available(version(TE), version(APEX), version(FLASH), version(TRITON), cuda, faults)


def layer_problem(available: Available, *, adapters: bool) -> str | None:
    """Reason against transformer-engine's layers; None if they can be used."""
    if not available.cuda:
        return ON_CUDA_ONLY
    if available.transformer_engine is None:
        return available.fault(TE)
    return "adapters (lora) need megatron-core's own layers" if adapters else None


def layer_kind(available: Available, *, adapters: bool) -> LayerKind:
    return "torch" if layer_problem(available, adapters=adapters) else "transformer_engine"


def kernel_table(available: Available) -> list[Kernels]:
    problem = layer_problem(available, adapters=False)
    te, apex = available.transformer_engine, available.apex
    fused = te or apex
    layers = "megatron-core's own linear layers, torch's RMSNorm" if problem else f"{TE} {te}"
    library = f"{TE} {te}" if te else f"{APEX} {apex}"
    absent = f"{available.fault(TE)}, and NVIDIA's {available.fault(APEX)}" if available.cuda else ON_CUDA_ONLY
    return [
        Kernels("layers and norms", layers, None if problem is None else f"{TE}'s: {problem}"),
        Kernels("Adam", f"fused, of {library if fused else 'torch'}"),
        Kernels(
            "gradient norm", f"fused, of {library}" if fused else "megatron-core's own", None if fused else f"fused: {absent}"
        ),
        _attention(available),
        Kernels(
            "context parallelism",
            "gathered keys and values" if problem else f"ring of {TE} {te} in bfloat16 and float16, else gathered keys",
            None if problem is None else f"{TE}'s ring: {problem}",
        ),
        Kernels("FP8", "off: log-probs of decoding would differ from training's"),
    ]


def _attention(available: Available) -> Kernels:
    if not available.cuda:
        return Kernels("attention", "torch's, over dense KV caches", "block tables: they need a CUDA device")
    if (version := available.flash_attn or available.triton) is None:
        lacking = f"block tables: {available.fault(FLASH)}, {available.fault(TRITON)}"
        return Kernels("attention", "torch's, over dense KV caches", lacking)
    library = f"{FLASH} {version}" if available.flash_attn else f"a kernel of this package by {TRITON} {version}"
    fault = None if available.flash_attn else f"{FLASH}'s: {available.fault(FLASH)}"
    return Kernels("attention", f"{library} with block tables in bfloat16 and float16, else torch's", fault)
