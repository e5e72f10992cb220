"""Stand-ins for the compiled halves of GPU libraries, so that their Python runs without a GPU.
Optimizer kernels are replaced by their arithmetic; every other name is a class of which nothing is computed."""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

COMPILED = ("transformer_engine_torch", "amp_C", "flash_attn_2_cuda")
OPTIONAL = ("onnxscript", "onnx", "triton", "nvdlfw_inspect")
"""What transformer-engine imports, but uses for exports and for kernels that are not called here."""


def adam(
    chunk: int, skip: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, decoupled: int, corrected: int, weight_decay: float,
) -> None:  # fmt: skip
    """`multi_tensor_adam` of transformer-engine and apex: gradients, weights and both moments."""
    assert decoupled, "the weight decay is AdamW's"
    first, second = (1 - beta**step if corrected else 1.0 for beta in (beta1, beta2))
    for grad, weight, mean, square in zip(*lists, strict=True):
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        weight.mul_(1 - lr * weight_decay).addcdiv_(mean / first, (square / second).sqrt() + eps, value=-lr)


def l2norm(chunk: int, skip: Tensor, lists: Sequence[Sequence[Tensor]], each: bool = False) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm`: of all tensors together, [1]; and of each."""
    norms = torch.stack([grad.float().norm() for grad in lists[0]])
    return norms.norm().view(1), norms if each else norms[:0]


def scale(chunk: int, skip: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """`multi_tensor_scale`: sources times a factor, into targets."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


KERNELS = {"multi_tensor_adam": adam, "multi_tensor_l2norm": l2norm, "multi_tensor_scale": scale}


class _Anything(type):
    """A class all of whose names are such classes: an enumeration, a type to compare with, or a function."""

    __members__: dict[str, Any] = {}

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(name, (_Thing,), {})
        setattr(cls, name, found)  # the same again, as a member of an enumeration
        return found

    def __int__(cls) -> int:
        return 0


class _Thing(metaclass=_Anything):
    """A value that can be called, and has every name: the result of such a function or decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Thing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()


class _Compiled(types.ModuleType):
    """A module of which every name is there."""

    __version__ = "3.5.0"  # of triton, which transformer-engine asks for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = KERNELS.get(name) or _Anything(name, (_Thing,), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]):
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Compiled(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def stand_in(names: Sequence[str] = COMPILED) -> None:
    """Make these compiled halves stand-ins, and optional ones absent, from now on; for a process of its own."""
    sys.meta_path.insert(0, _Finder(tuple(names)))
    sys.meta_path.append(_Finder(OPTIONAL))


def import_transformer_engine() -> Any:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that it looks for none of the common half
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformer_engine import common

        with mock.patch.object(common, "load_framework_extension", lambda framework: None):
            import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    _in_a_world_with_cuda(TransformerEngineBaseModule)
    return te


def _in_a_world_with_cuda(kind: type) -> None:
    """The constructor of a class asks whether there is a CUDA device, and is told yes."""
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            construct(self, *args, **kwargs)

    kind.__init__ = constructed


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """`torch.tensor(..., device="cuda")` gives a tensor of the CPU, as the optimizers' flags are made."""
    made = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return made(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    with mock.patch.object(torch, "tensor", tensor):
        yield
