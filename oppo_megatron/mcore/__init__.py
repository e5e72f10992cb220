"""Imports megatron-core in half the time: without torch's compiler, TensorBoard, Weights & Biases and unusable libraries."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from oppo_megatron.layout.kernels import APEX, TE, usable

_IGNORED = {
    # raised in every process for absent optional packages, which `oppo validate` reports once
    UserWarning: [
        ".*Apex", ".*Transformer Engine", "full scope is deprecated", "If you are using transformer_engine",
        ".* is experimental and still under active development",  # of classes that are not used
        r"The \.grad attribute of a Tensor that is not a leaf",  # the distributed optimizer reads it of each parameter's shard
    ],
    # torch functions that a later torch will replace
    FutureWarning: [
        "`load_state_dict` is deprecated", "Please use DTensor instead", r"`torch\.distributed\.\w+` is deprecated",
    ],
}  # fmt: skip
_UNHEARD = ("models.gpt.gpt_model", "dist_checkpointing.strategies.common")  # 0.19 calls GPTModel and common.pt deprecated
_COMPILE = torch.compile


def compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if function is None:
        return functools.partial(compiled_when_called, **options)
    compiled = functools.cache(lambda: _COMPILE(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    call._torchdynamo_inline = function  # type: ignore[attr-defined]  # as torch marks its own, for one within another
    return call


def _import_megatron() -> None:
    absent = {name: None for name in ("wandb", "torch.utils.tensorboard") if name not in sys.modules}
    for library, package in ((TE, "transformer_engine"), (APEX, "apex")):
        if "megatron.core" not in sys.modules and not usable(library):
            sys.modules[package] = None  # type: ignore[assignment]  # importing it raises ImportError from now on
    with mock.patch.object(torch, "compile", compiled_when_called):
        sys.modules.update(absent)  # type: ignore[arg-type]
        try:
            importlib.import_module("megatron.core")
        finally:
            for name in absent:
                del sys.modules[name]


for _category, _messages in _IGNORED.items():
    for _message in _messages:
        warnings.filterwarnings("ignore", message=_message, category=_category)
for _name in _UNHEARD:
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)
_import_megatron()
