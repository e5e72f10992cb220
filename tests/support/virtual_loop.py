"""An event loop of asyncio in which waiting takes no time: its clock goes on to the next timer once nothing is left to do."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for coroutines that wait for each other and for timers alone: the same order on every machine."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Impatient(self))

    def time(self) -> float:
        return self.now_s


class _Impatient(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all coroutines wait for something that nobody will do"
        self._loop.now_s += timeout
        return super().select(0)


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
