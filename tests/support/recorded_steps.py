"""CUDA graphs on the CPU: a step's operations are recorded, and repeated in the same memory.
Misses what a graph would miss, and refuses operations for which the host waits for the device, or copies to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from oppo_megatron.mcore.device import CapturedSteps

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "lift_fresh")


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert name not in REFUSED and not by_mask, f"{func.name()} cannot be captured: the host waits for it, or copies to it"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_flatten(out)[0]))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        """The first stands for the recording itself, which has computed what a capture would not."""
        self.replays += 1
        if self.replays == 1:
            return
        for func, args, kwargs, outputs in self.calls:
            given = {_address(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
            found = tree_flatten(func(*args, **kwargs))[0]
            for old, new in zip(outputs, found, strict=True):
                if isinstance(old, Tensor) and _address(old) not in given:  # else a view, or changed in place
                    old.copy_(new)


class RecordedSteps(CapturedSteps):
    def __init__(self, model: torch.nn.Module):
        super().__init__(torch.device("cpu"), model.parameters)
        self.recordings: list[Recording] = []

    def _capture(self, step: Callable[[], None]) -> Recording:
        self.recordings.append(Recording())
        with self.recordings[-1], torch.device("meta"):  # what names no device would not be on the GPU either
            step()
        return self.recordings[-1]


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
