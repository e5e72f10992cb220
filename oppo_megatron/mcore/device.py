"""Device copies, out-of-memory errors and captured decode steps."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.errors import CapacityError, OppoError
from oppo_megatron.layout.kernels import TRITON, usable


def on_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy to the device without a host wait."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
NO_KERNEL = "could not create a primitive"  # oneDNN's whole message if memory for a kernel's code is lacking


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OppoError):
        return False
    text = str(error)
    on_host = isinstance(error, RuntimeError) and (text == NO_KERNEL or any(words in text for words in CPU_WORDS))
    return on_host or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def triton_runs(trial: Callable[[], object], lost: str) -> bool:
    """True if Triton is there and `trial` works, which needs a C compiler and Python's headers; else warns of `lost`."""
    if not usable(TRITON):
        return False
    try:
        trial()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        told = shorten(str(error), 200, placeholder=" ...")
        warnings.warn(f"triton cannot build a kernel ({type(error).__name__}: {told}); {lost}", stacklevel=2)
        return False
    return True


@contextmanager
def memory_for(describe: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Raise CapacityError if memory runs out; `describe` returns work, remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        (work, remedy), text = describe(), str(error).partition("\n")[0]
        reason = text[max(0, text.find("DefaultCPUAllocator")) :].split(". ")[0] or type(error).__name__
        raise CapacityError(f"memory ran out in {work} ({reason}); {remedy}") from error


def too_many_tokens(work: str, lengths: Sequence[int], answers: int = 1) -> tuple[str, str]:
    """Return work and remedy; `answers`: sequences kept together."""
    tokens = sum(lengths)
    if len(lengths) <= answers:
        remedy = "lower the maximum lengths of prompts and responses"
    else:
        fewer = max(tokens // 2, answers * max(lengths))
        remedy = f"set runtime.micro_batch_tokens to {fewer} or less"
    return f"{work} of {tokens} tokens", f"{remedy}, or use more ranks"


def too_many_sequences(work: str, sequences: int, cache_bytes: int) -> tuple[str, str]:
    megabytes = max(1, cache_bytes // 2**21)
    return (
        f"{work} of {sequences} sequences",
        f"set runtime.kv_cache_mb to {megabytes} or less (this cache takes {-(-cache_bytes // 2**20)} MiB) to decode fewer "
        "sequences at once, or use more ranks",
    )


StepRunner = Callable[[Hashable, Callable[[], None]], None]
"""Runs a step; steps with the same key do the same work, so that one can be replayed."""

WARM_UPS = 2  # runs before a capture: libraries choose kernels and make workspaces


def run_eagerly(key: Hashable, step: Callable[[], None]) -> None:
    step()


class CapturedSteps:
    """Runs a key's first steps eagerly, then replays a CUDA graph; `renew` drops graphs if weights have moved."""

    def __init__(self, device: torch.device, weights: Callable[[], Iterable[Tensor]]):
        self._device, self._weights = device, weights
        self._stream = new_stream(device, first=True) if device.type == "cuda" else None  # replays have its priority
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._addresses: list[int] = []
        self._refused = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def renew(self) -> None:
        addresses = [weight.data_ptr() for weight in self._weights()]
        if addresses != self._addresses:
            self._graphs.clear()
            self._runs.clear()
            self._pool, self._addresses = None, addresses

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None and not self._refused and self._runs.get(key, 0) >= WARM_UPS:
            try:
                graph = self._graphs[key] = self._capture(step)
            except RuntimeError as error:
                # The end of the capture then raises, too; the error before it names the operation at fault.
                if is_out_of_memory(error) or "captur" not in str(error):
                    raise
                self._refused = True
                first = str(error.__context__ or error).partition("\n")[0]
                print(f"decode steps are run without CUDA graphs from here on: {first}", file=sys.stderr, flush=True)
        if graph is not None:
            graph.replay()
            return
        self._runs[key] = self._runs.get(key, 0) + 1
        step()

    def _capture(self, step: Callable[[], None]) -> Any:
        """Without `torch.cuda.graph`, which waits for the device and empties all caches."""
        assert self._stream is not None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        collects = gc.isenabled()
        gc.disable()  # a graph that is freed meanwhile would end the capture
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, "thread_local")  # NCCL's watchdog queries events
                try:
                    step()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        outside.wait_stream(self._stream)
        return graph


def new_stream(device: torch.device, *, first: bool = False) -> torch.cuda.Stream:
    """`first`: its kernels go before those that wait on other streams."""
    return torch.cuda.Stream(device, priority=-1 if first else 0)
