"""Patches that megatron-core needs without a CUDA device, and what differs between its versions 0.16 to 0.19."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from packaging.version import Version


@dataclass(frozen=True)
class Patch:
    """`serves`: `path:function` below megatron/core; `because`: the text there, in versions from `since`."""

    serves: str
    because: str
    apply: Callable[[], None]
    since: str = "0"

    @property
    def is_needed(self) -> bool:
        return Version(self.since) <= Version(megatron.core.__version__)


class _TorchOnCpu(types.ModuleType):
    """Replaces `torch` in a module: device "cuda" makes CPU tensors."""

    FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _replace(owner: object, name: str, stand_in: object) -> None:
    setattr(importlib.import_module(f"megatron.core.{owner}") if isinstance(owner, str) else owner, name, stand_in)


def _replace_torch(module: str) -> Callable[[], None]:
    return lambda: _replace(module, "torch", _TorchOnCpu())


def _clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Clip without the original's assertion of CUDA gradients."""
    scale = max_norm / (total_norm + 1.0e-6)
    name = "decoupled_grad" if use_decoupled_grad else "grad"
    grads = [getattr(p, name) for p in parameters if getattr(p, name, None) is not None]
    if scale < 1.0 and grads:
        torch._foreach_mul_([grad.detach() for grad in grads], scale)


def _parameter_type() -> None:
    """megatron sorts parameters by the string 'torch.cuda.BFloat16Tensor'."""
    original = torch.nn.Parameter.type

    def type_name(self: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and ".cuda." not in found else found

    _replace(torch.nn.Parameter, "type", type_name)


PATCHES = (
    Patch("tensor_parallel/mappings.py:_gather_along_last_dim", "torch.cuda.current_device()",
          lambda: _replace(torch.cuda, "current_device", lambda: torch.device("cpu"))),
    Patch("pipeline_parallel/p2p_communication.py:_communicate_shapes", "torch.cuda.synchronize()",
          lambda: _replace(torch.cuda, "synchronize", lambda device=None: None)),
    Patch("distributed/param_and_grad_buffer.py:start_grad_sync", "current_stream = torch.cuda.current_stream()",
          lambda: _replace(torch.cuda, "current_stream", lambda device=None: None), since="0.19"),
    Patch("models/common/language_module/language_module.py:setup_embeddings_and_output_layer", "weight.data.cuda()",
          lambda: _replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)),
    Patch("pipeline_parallel/schedules.py:forward_backward_no_pipelining", 'device="cuda"',
          _replace_torch("pipeline_parallel.schedules")),
    Patch("optimizer/optimizer.py:__init__", "device='cuda'", _replace_torch("optimizer.optimizer")),
    Patch("optimizer/clip_grads.py:get_grad_norm_fp32", "device='cuda'", _replace_torch("optimizer.clip_grads")),
    Patch("utils.py:local_multi_tensor_l2_norm", 'device="cuda"', _replace_torch("utils")),
    Patch("optimizer/clip_grads.py:clip_grad_by_total_norm_fp32", "param.grad.type() == 'torch.cuda.FloatTensor'",
          lambda: _replace("optimizer.optimizer", "clip_grad_by_total_norm_fp32", _clip)),
    Patch("optimizer/optimizer.py:__init__", "'torch.cuda.BFloat16Tensor'", _parameter_type),
    # Recomputed activations save the state of the CPU's generator without the missing CUDA generator's.
    Patch("tensor_parallel/random.py:_get_cuda_rng_state", "torch.cuda.random.get_rng_state(device=device)", lambda: _replace(
        "tensor_parallel.random", "_get_cuda_rng_state", lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8))),
    Patch("tensor_parallel/random.py:_set_cuda_rng_state", "_lazy_call(cb)", lambda: _replace(
        "tensor_parallel.random", "_set_cuda_rng_state", lambda *args, **kwargs: None)),
)  # fmt: skip


def install() -> bool:
    """Apply all patches unless there is a CUDA device; True if applied."""
    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda.current_device, "__module__", "").startswith(__name__):
        for patch in PATCHES:
            if patch.is_needed:
                patch.apply()
        # megatron advises this setting in every tensor-parallel process; without CUDA it means nothing.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return True


def parts_of(mlp: Any) -> Any:
    """Return the modules of an MLP's spec, since 0.18 a `functools.partial` (`get_mlp_module_spec_for_backend`)."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def mark_shards(model: torch.nn.Module) -> None:
    """Mark shards, so that gradient norms count each weight once; since 0.18 tensor_parallel/layers.py does."""
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)) and module.weight is not None:
            if not hasattr(module.weight, "tensor_model_parallel"):
                stride = 2 if name.endswith("linear_fc1") else 1  # gate and up are sharded separately
                set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), stride)


def make_scratch_memory() -> None:
    """Make the buffer that tensor_parallel/layers.py asks for (on GPUs too)."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def keep_norms_on_device() -> None:
    """Sum gradient norms on the GPU; `utils.local_multi_tensor_l2_norm` waits for each."""
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    plain = getattr(clip_grads, "local_multi_tensor_l2_norm", None)
    if torch.cuda.is_available() and plain is not None and clip_grads.l2_norm_impl is plain:
        _replace(clip_grads, "l2_norm_impl", norm_on_device)


def norm_on_device(_chunk: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any) -> Any:
    return torch.nn.utils.get_total_norm(lists[0]).float().reshape(1), None


@contextlib.contextmanager
def known_norm(optimizer: Any, norm: float) -> Iterator[None]:
    """Let `step` use `norm` without waiting again.  Since 0.19 it would wait for norms of groups too: there are none."""
    no_groups = mock.patch.object(optimizer, "has_grad_norm_group", lambda group: False, create=True)
    with no_groups, mock.patch.object(optimizer, "get_grad_norm", lambda: norm):
        yield


@contextlib.contextmanager
def no_lone_sums() -> Iterator[None]:
    """Skip sums over one rank in param_and_grad_buffer.py:start_grad_sync and clip_grads.py:get_grad_norm_fp32."""
    plain = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        alone = not async_op and dist.get_world_size(group) == 1
        return None if alone else plain(tensor, op=op, group=group, async_op=async_op)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


@contextlib.contextmanager
def optimizer_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Narrow "the world" to a model's ranks for `optimizer._get_param_groups`."""
    gather = dist.all_gather_object
    with (
        mock.patch.object(dist, "all_gather_object", lambda objects, obj, g=None: gather(objects, obj, group=g or group)),
        mock.patch.object(dist, "get_world_size", lambda g=None: (g or group).size()),
    ):
        yield
