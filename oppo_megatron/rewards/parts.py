"""One part of a reward: the protocol that rules, functions, processes and services share, and the parts without a process."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from oppo_megatron.errors import RewardError
from oppo_megatron.plugins import said_of
from oppo_megatron.rewards.protocol import ScoreItem

Fields = Mapping[str, Any]
"""The columns of a prompt's row, other than the prompt's."""


class Part:
    """`waits`: scores take time, so they are requested as soon as responses are known.  `names_itself`: its errors need no label.
    """

    waits: ClassVar[bool] = False
    names_itself: ClassVar[bool] = False

    def about(self) -> str:
        """A line that a user should know before the run; empty: there is nothing to say."""
        return ""

    def check(self, fields: Fields) -> None:
        """Raise RewardError if a response to this row could not be scored."""

    def unusable(self, rows: Sequence[Fields], tell: Callable[[str], None]) -> dict[int, str]:
        """By place, why a row that `check` accepted cannot be scored within the limits."""
        return {}

    def score(self, item: ScoreItem, num_tokens: int | None) -> Any:
        """The score of a response of `num_tokens`, which has been requested; waits for it.  Raises RewardError."""
        raise NotImplementedError

    def requested(self, seq_id: int) -> bool:
        """True if the score of this sequence has been asked for and not yet taken."""
        return True

    def request(self, items: Sequence[ScoreItem]) -> None:
        """Ask for scores; returns at once.  A sequence that is being scored is not asked for again."""

    def forget(self, seq_id: int) -> None:
        """Drop a request: no score of this sequence will be taken."""

    def close(self) -> None:
        """End threads and processes."""


class ModelScore(Part):
    """The reward model's score, which the caller of the sum has."""


@dataclass(frozen=True)
class RulePart(Part):
    """A rule in this process; `expected` reads the columns that it needs."""

    rate: Callable[[ScoreItem, int | None], float]
    expected: Callable[[Fields], Any] | None = None

    def check(self, fields: Fields) -> None:
        if self.expected is not None:
            self.expected(fields)

    def score(self, item: ScoreItem, num_tokens: int | None) -> float:
        return self.rate(item, num_tokens)


@dataclass(frozen=True)
class UserFunction(Part):
    """A user's function, called in this process.  Raises RewardError if it raises, or asks to end the process."""

    function: Callable[..., Any]

    def about(self) -> str:
        """The first line of its docstring."""
        called = self.function.func if isinstance(self.function, partial) else self.function
        return (inspect.getdoc(called) or "").partition("\n")[0]

    def score(self, item: ScoreItem, num_tokens: int | None) -> Any:
        try:
            with staying():
                return self.function(item.prompt, item.response, item.fields)
        except (SystemExit, ProcessExit) as error:
            raise RewardError(f"it asked to end the process ({said_of(error)}); return a number, or raise") from error
        except Exception as error:
            raise RewardError(said_of(error)) from error


class ProcessExit(Exception):
    """A user's function called `os._exit`, which would have ended the run without a word."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """While the block runs, `os._exit` raises `ProcessExit` in this thread; processes made meanwhile end as they ask to."""
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
