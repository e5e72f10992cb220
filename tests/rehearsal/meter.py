"""Bytes that tensors of the fake device hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tests.rehearsal.watch import Watch, memory_of

ROUNDED = 512
"""torch's allocator gives multiples of so many bytes."""


class Meter(Watch):
    """Counts the memory that is held now, and the most at once since the last `span` began."""

    def __init__(self) -> None:
        super().__init__({})
        self.held = self.most = 0
        self._alive: set[int] = set()

    def _launch(self, reads: Any = (), writes: Any = (), fresh: Any = ()) -> None:
        for each in tree_leaves(fresh):
            if isinstance(each, FakeTensor) and each.device.type == "cuda":
                self._count(each)

    def _account(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        super()._account(func, name, args, kwargs, out)
        if name == "logsumexp" and args[0].device.type == "cuda":  # on a GPU a call of several kernels, with this between them
            self.most = max(self.most, self.held + args[0].nbytes)

    def _count(self, tensor: FakeTensor) -> None:
        storage, memory = tensor.untyped_storage(), memory_of(tensor)
        if memory in self._alive:
            return
        self._alive.add(memory)
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._free, memory, size)

    def _free(self, memory: int, size: int) -> None:
        self._alive.discard(memory)
        self.held -= size

    @contextmanager
    def span(self) -> Iterator[Span]:
        found = Span(self.held)
        self.most = self.held
        yield found
        found.kept, found.peak = self.held - found.before, self.most - found.before


class Span:
    """`kept`: bytes held at the end beyond those at the beginning; `peak`: the most at once, beyond those."""

    def __init__(self, before: int):
        self.before, self.kept, self.peak = before, 0, 0
