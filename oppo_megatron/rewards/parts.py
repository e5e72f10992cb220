from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from oppo_megatron.errors import RewardError
from oppo_megatron.plugins import said_of
from oppo_megatron.rewards.protocol import ScoreItem

Fields = Mapping[str, Any]
"""Columns of a prompt's row, except the prompt."""


class Part:
    """`waits`: scores take time, so request them early. `names_itself`: its errors need no label."""

    waits: ClassVar[bool] = False
    names_itself: ClassVar[bool] = False

    def about(self) -> str:
        """A line for the user before the run, or ""."""
        return ""

    def check(self, fields: Fields) -> None:
        """Raise RewardError if a response to this row could not be scored."""

    def unusable(self, rows: Sequence[Fields], tell: Callable[[str], None], *, every: bool) -> dict[int, str]:
        """Why rows cannot be scored within the limits, by row. `every`: also try rows that surely can."""
        return {}

    def score(self, item: ScoreItem, num_tokens: int | None) -> Any:
        """Wait for the requested score. Raises RewardError."""
        raise NotImplementedError

    def requested(self, seq_id: int) -> bool:
        """True if the score is requested and not yet taken."""
        return True

    def request(self, items: Sequence[ScoreItem]) -> None:
        """Request scores and return at once; never asks twice for a sequence."""

    def forget(self, seq_id: int) -> None:
        """Drop a request."""

    def close(self) -> None:
        """End threads and processes."""


class ModelScore(Part):
    """The reward model's score, passed by the caller."""


@dataclass(frozen=True)
class RulePart(Part):
    """`expected` reads the columns it needs."""

    rate: Callable[[ScoreItem, int | None], float]
    expected: Callable[[Fields], Any] | None = None

    def check(self, fields: Fields) -> None:
        if self.expected is not None:
            self.expected(fields)

    def score(self, item: ScoreItem, num_tokens: int | None) -> float:
        return self.rate(item, num_tokens)


@dataclass(frozen=True)
class UserFunction(Part):
    """Raises RewardError if the function raises or asks to end the process."""

    function: Callable[..., Any]

    def about(self) -> str:
        called = self.function.func if isinstance(self.function, partial) else self.function
        return (inspect.getdoc(called) or "").partition("\n")[0]

    def score(self, item: ScoreItem, num_tokens: int | None) -> Any:
        try:
            with staying():
                return self.function(item.prompt, item.response, deepcopy(item.fields))  # other parts read them, too
        except (SystemExit, ProcessExit) as error:
            raise RewardError(f"it asked to end the process ({said_of(error)}); return a number, or raise") from error
        except Exception as error:
            raise RewardError(said_of(error)) from error


class ProcessExit(Exception):
    """A user's function called `os._exit`."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """In the block, `os._exit` raises `ProcessExit` in this thread; child processes can still end."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def stay(code: int) -> Any:
        if (os.getpid(), threading.get_ident()) == (process, thread):
            raise ProcessExit(f"os._exit({code})")
        leave(code)

    os._exit = stay  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
