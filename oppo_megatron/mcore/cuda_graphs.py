"""Steps of fixed shapes as CUDA graphs: captured once, then replayed without the host's launch cost of each kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.mcore.out_of_memory import is_out_of_memory

StepRunner = Callable[[Hashable, Callable[[], None]], None]
"""Does a step, which computes the same whenever it has the same key, in the same tensors."""

WARM_UPS = 2
"""Runs of a step before it is captured: libraries choose kernels and make their workspaces in them."""


def run_eagerly(key: Hashable, step: Callable[[], None]) -> None:
    """Run a step without graphs."""
    step()


class CapturedSteps:
    """Runs the first steps of a key eagerly, then captures one and replays it.

    A graph holds the addresses of its inputs.  An optimizer updates weights in place, so graphs stay valid; if weights have
    moved (`weights` are compared at each `renew`), all graphs are dropped.  Graphs of one object share their memory, because
    they never run at the same time.

    If CUDA refuses a capture (a library's kernel that waits for the device), a warning goes to stderr, and steps of new keys
    run eagerly: slower, with the same tokens.
    """

    def __init__(self, device: torch.device, weights: Callable[[], Iterable[Tensor]]):
        self._device, self._weights = device, weights
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._addresses: list[int] = []
        self._refused = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def renew(self) -> None:
        """Called before the first step of a round."""
        addresses = [weight.data_ptr() for weight in self._weights()]
        if addresses != self._addresses:
            self._graphs.clear()
            self._runs.clear()
            self._pool, self._addresses = None, addresses

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None and not self._refused and self._runs.get(key, 0) >= WARM_UPS:
            graph = self._try_capture(key, step)
        if graph is not None:
            graph.replay()
            return
        self._runs[key] = self._runs.get(key, 0) + 1
        step()

    def _try_capture(self, key: Hashable, step: Callable[[], None]) -> Any | None:
        """The step's graph, or None if CUDA refuses to capture it."""
        try:
            graph = self._graphs[key] = self._capture(step)
        except RuntimeError as error:
            # The end of the capture then raises, too; the error before it names the operation at fault.
            if is_out_of_memory(error) or "captur" not in str(error):
                raise
            self._refused = True
            first = str(error.__context__ or error).partition("\n")[0]
            print(f"decode steps are run without CUDA graphs from here on: {first}", file=sys.stderr, flush=True)
            return None
        return graph

    def _capture(self, step: Callable[[], None]) -> Any:
        """Capture the step without computing it.  `thread_local`: NCCL's watchdog may query its events meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        return graph
