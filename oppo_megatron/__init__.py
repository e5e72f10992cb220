"""Overlapped PPO (OPPO) for language models on Megatron-core.  Names of `__all__` load on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "oppo_megatron.api": ("load_config", "generate", "evaluate", "plan", "Result"),
    "oppo_megatron.algorithms.custom": ("AdvantageInputs", "LossInputs"),
    "oppo_megatron.records": ("StepSignals",),
    "oppo_megatron.schedule.rounds": ("Round", "Site"),
    "oppo_megatron.schedule.actions": ("Action", "Schedule"),
    "oppo_megatron.schedule.weaving.costs": ("Costs",),
    "oppo_megatron.schedule.weaving.generators": ("sequential", "intra", "woven"),
    "oppo_megatron.errors": ("OppoError",),
}
__all__ = ["train", *(name for names in _NAMES.values() for name in names)]


def __getattr__(name: str) -> Any:
    if name == "train":
        return importlib.import_module("oppo_megatron.train")  # a package that can be called
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
