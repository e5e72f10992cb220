"""The implementation of each part that a run takes from the installed libraries, and why not a faster one.  Pure.

megatron-core chooses optimizers and gradient norms by itself, in the order given here (optimizer/__init__.py:12-32,
optimizer/clip_grads.py:20); layers and attention are this package's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from oppo_megatron.config.model import Layers

LayerKind = Literal["torch", "transformer_engine"]
TE, APEX, FLASH = "transformer-engine", "apex", "flash-attn"


@dataclass(frozen=True)
class Available:
    """Versions of the installed libraries (None: absent).  `apex` is NVIDIA's; `other_apex` is PyPI's package of that name."""

    transformer_engine: str | None = None
    apex: str | None = None
    flash_attn: str | None = None
    cuda: bool = False
    other_apex: bool = False


@dataclass(frozen=True)
class Kernels:
    """The implementation of a part, and the requirement that a faster one lacks (None: there is none faster)."""

    part: str
    used: str
    lacking: str | None = None


def find_available(cuda: bool, has_module: Callable[[str], bool] | None = None) -> Available:
    """What can be imported here.  Nothing is: a library that is broken shows when it is used."""
    has = has_module or (lambda name: find_spec(name) is not None)

    def version(module: str, distribution: str) -> str | None:
        if not has(module):
            return None
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return "of unknown version"

    kernels = has("amp_C")  # built by NVIDIA's apex alone
    return Available(
        transformer_engine=version("transformer_engine", TE),
        apex=version("apex", APEX) if kernels else None,
        flash_attn=version("flash_attn", FLASH),
        cuda=cuda,
        other_apex=has("apex") and not kernels,
    )


def layer_problem(available: Available, *, adapters: bool) -> str | None:
    """Why layers cannot be transformer-engine's; None where they can."""
    if not available.cuda:
        return "it computes on CUDA devices only"
    if available.transformer_engine is None:
        return f"{TE} is not installed"
    return "adapters (lora) stand beside megatron-core's own layers only" if adapters else None


def layer_kind(wanted: Layers, available: Available, *, adapters: bool) -> LayerKind:
    """The layers of a model.  `auto`: transformer-engine's where they can be."""
    if wanted == "auto":
        return "torch" if layer_problem(available, adapters=adapters) else "transformer_engine"
    return wanted


def layers_refused(wanted: Layers, available: Available, *, adapters: bool) -> str | None:
    """Why layers that are asked for by name cannot be had, and what to set; None where they can."""
    problem = layer_problem(available, adapters=adapters)
    if wanted != "transformer_engine" or problem is None:
        return None
    return f"runtime.layers is transformer_engine, but {problem}; set it to auto or torch"


def kernel_table(available: Available) -> list[Kernels]:
    """Each part of a run on this machine, with `runtime.layers: auto` and no adapters."""
    problem = layer_problem(available, adapters=False)
    te, apex = available.transformer_engine, available.apex
    fused = te or apex
    layers = "megatron-core's own linear layers, torch's RMSNorm" if problem else f"{TE} {te}"
    library = f"{TE} {te}" if te else f"{APEX} {apex}"
    absent = _absent(available)
    return [
        Kernels("layers and norms", layers, None if problem is None else f"{TE}'s: {problem}"),
        Kernels("Adam", f"fused, of {library if fused else 'torch'}"),
        Kernels("gradient norm", f"fused, of {library}" if fused else "megatron-core's own", None if fused else absent),
        _attention(available),
        Kernels("FP8", "off: log-probs of decoding would not be those of training"),
    ]


def _absent(available: Available) -> str:
    if available.other_apex:
        return f"fused: {TE} is not installed, and the {APEX} that is has no kernels (PyPI's is not NVIDIA's)"
    return f"fused: neither {TE} nor NVIDIA's {APEX} is installed"


def _attention(available: Available) -> Kernels:
    if not available.cuda:
        return Kernels("attention", "torch's, over dense KV caches", "block tables: they need a CUDA device")
    if available.flash_attn is None:
        lacking = f"{FLASH} with block tables: it is not installed (torch's own FA3, where activated, serves too)"
        return Kernels("attention", "torch's", lacking)
    return Kernels(
        "attention", f"{FLASH} {available.flash_attn} with block tables in bfloat16 and float16, else torch's"
    )
