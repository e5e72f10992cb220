"""Imports megatron-core without parts that a rank never calls, which take nearly half of the import's time.

- Its fusions are decorated by `torch.compile`, which loads torch's compiler (dynamo, inductor, sympy, networkx) when it
  decorates.  Here that waits for the first call.
- It expects an ImportError of a transformer-engine or apex that cannot be used, but their loaders raise other errors too.
- Its timers name the types of TensorBoard's and Weights & Biases' writers; `train/logs/trackers.py` loads these on request.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from oppo_megatron.layout.kernels import APEX, TE, usable

UNUSED = ("wandb", "torch.utils.tensorboard")
"""Optional imports of megatron-core (each within `try: ... except ImportError`)."""


def compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function, at its first call."""
    if function is None:
        return functools.partial(compiled_when_called, **options)
    compiled = functools.cache(lambda: _COMPILE(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    call._torchdynamo_inline = function  # type: ignore[attr-defined]  # as torch marks its own, for one within another
    return call


_COMPILE = torch.compile


def import_megatron() -> None:
    """Import `megatron.core`, unless it has been imported."""
    with mock.patch.object(torch, "compile", compiled_when_called), _absent(UNUSED):
        for library, package in ((TE, "transformer_engine"), (APEX, "apex")):
            if "megatron.core" not in sys.modules and not usable(library):
                sys.modules[package] = None  # type: ignore[assignment]  # importing it raises ImportError from now on
        importlib.import_module("megatron.core")


@contextmanager
def _absent(names: tuple[str, ...]) -> Iterator[None]:
    """In the block, importing any of these that is not loaded yet raises ImportError."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
