"""Counts what a rank sends and what it pickles for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

CALLS = {"isend": 0, "all_gather": 1, "broadcast": 0, "all_reduce": 0}
"""By name the place of the tensor that the rank sends."""


@dataclass
class Traffic:
    """Calls by name, the bytes of this rank's tensors in them, and the objects that were pickled; while `open`."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    pickled: int = 0
    open: bool = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.open, before = True, self.open
        try:
            yield
        finally:
            self.open = before

    def taken(self) -> Traffic:
        counted = Traffic(self.calls, self.num_bytes, self.pickled)
        self.calls, self.num_bytes, self.pickled = Counter(), Counter(), 0
        return counted

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as patches:
            for name, place in CALLS.items():
                counted = self._counted(name, place, getattr(c10d, name))
                for module in (c10d, dist):
                    patches.enter_context(mock.patch.object(module, name, counted))
            pickle = c10d._object_to_tensor

            def pickling(*args: Any, **options: Any) -> Any:
                self.pickled += self.open
                return pickle(*args, **options)

            patches.enter_context(mock.patch.object(c10d, "_object_to_tensor", pickling))
            yield

    def _counted(self, name: str, place: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.open:
                sent: Tensor = args[place]
                self.calls[name] += 1
                self.num_bytes[name] += sent.numel() * sent.element_size()
            return call(*args, **options)

        return counted
