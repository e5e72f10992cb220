"""Four shims for NeMo-Aligner without a GPU: no TensorRT-LLM, no CUDA device, `cuda` is the CPU, gloo gathers no scalar."""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaIsCpu(TorchFunctionMode):
    """`device="cuda"`, `.cuda()` and `.to("cuda")` stay where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return func(*(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


def install() -> None:
    """Call once a process, before `nemo_aligner` is imported."""
    if "nemo_aligner.utils.trt_llm" in sys.modules:
        return
    stub = types.ModuleType("nemo_aligner.utils.trt_llm")
    stub.GPTGenerateTRTLLM = type("GPTGenerateTRTLLM", (), {})
    sys.modules[stub.__name__] = stub
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.LongTensor, torch.cuda.FloatTensor, torch.cuda.ByteTensor = (
        torch.LongTensor, torch.FloatTensor, torch.ByteTensor,
    )  # fmt: skip
    torch.nn.Module.cuda = lambda module, device=None: module
    dist.all_gather_into_tensor = _gather_scalars(dist.all_gather_into_tensor)
    CudaIsCpu().__enter__()


def _gather_scalars(gather: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output, given.view(-1) if given.ndim == 0 else given, *args, **kwargs)

    return call
