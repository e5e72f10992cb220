"""A rule that may hang or crash, in several processes."""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from oppo_megatron.clock import ByTime
from oppo_megatron.rewards.isolation import IsolatedFunction, Unanswered
from oppo_megatron.rewards.parts import Fields, Part
from oppo_megatron.rewards.protocol import ScoreItem

SHOWN = 5
PROCESSES = 4
"""Responses that are checked at once."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Tries expected answers by scoring `response`, if their columns are `needed`; NaN: comparable only as text."""

    response: str
    needed: Callable[[Fields], bool]


class IsolatedRule(Part):
    """Scores 0.0 if a response exceeds the limits or ends the process. `read` returns the needed columns."""

    waits = True

    def __init__(
        self, make: Callable[[], IsolatedFunction], read: Callable[[Fields], dict[str, Any]], about: Callable[[], str] = str,
        trial: Trial | None = None,
    ):  # fmt: skip
        self._functions = [make() for _ in range(PROCESSES)]
        self._read, self._about, self._trial = read, about, trial
        self._tried: dict[str, str | None] = {}
        """Why an expected answer cannot be compared, or None if it can."""
        self._scores: dict[int, Future[float]] = {}
        self._waiting: queue.SimpleQueue[tuple[ScoreItem, Future[float]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def about(self) -> str:
        return self._about()

    def check(self, fields: Fields) -> None:
        self._read(fields)

    def score(self, item: ScoreItem, num_tokens: int | None) -> float:
        return self.result(item.seq_id)

    def unusable(self, rows: Sequence[Fields], tell: Callable[[str], None]) -> dict[int, str]:
        """Try each distinct expected answer once."""
        if self._trial is None:
            return {}
        read = [self._read(fields) for fields in rows]
        tried = {str(fields): row for row, fields in zip(rows, read, strict=True) if self._trial.needed(fields)}
        self.request([ScoreItem(-1 - i, "", self._trial.response, row) for i, row in enumerate(tried.values())])
        tell_by_time, texts = ByTime(tell), list[str]()
        for number, answer in enumerate(tried):
            if math.isnan(self.result(-1 - number)):
                texts.append(answer)
            tell_by_time(f"trying expected answers: {number + 1} of {len(tried)}")
        if texts:
            shown = ", ".join(f"{answer:.100}" for answer in texts[:SHOWN])
            tell(f"{len(texts)} expected answers are not understood as mathematics, and are compared as text: {shown}")
        reasons = (self._tried.get(str(fields)) for fields in read)
        return {place: reason for place, reason in enumerate(reasons) if reason is not None}

    def requested(self, seq_id: int) -> bool:
        return seq_id in self._scores

    def request(self, items: Sequence[ScoreItem]) -> None:
        assert not self._closed, "who has closed a rule asks it for no score"
        for item in items:
            if item.seq_id not in self._scores:
                self._scores[item.seq_id] = Future()
                self._waiting.put((item, self._scores[item.seq_id]))
        while items and len(self._threads) < len(self._functions):
            function = self._functions[len(self._threads)]
            thread = threading.Thread(target=self._serve, args=(function,), name="reward rule", daemon=True)
            self._threads.append(thread)
            thread.start()

    def result(self, seq_id: int) -> float:
        return self._scores.pop(seq_id).result()

    def forget(self, seq_id: int) -> None:
        self._scores.pop(seq_id, None)

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._waiting.put(None)
        for function, thread in zip(self._functions, self._threads, strict=False):
            while thread.is_alive():
                function.interrupt()
                thread.join(timeout=0.1)

    def _serve(self, function: IsolatedFunction) -> None:
        while (task := self._waiting.get()) is not None and not self._closed:
            item, score = task
            try:
                score.set_result(self._rate(function, item))
            except Exception as error:  # for whoever takes the score
                score.set_exception(error)
        function.close()

    def _rate(self, function: IsolatedFunction, item: ScoreItem) -> float:
        fields = self._read(item.fields)
        if self._tried.get(str(fields)) is not None:
            return 0.0
        try:
            return function(item.prompt, item.response, fields)
        except Unanswered as error:
            if self._trial is not None and str(fields) not in self._tried:
                self._try(function, fields, item.response, error)
            return 0.0

    def _try(self, function: IsolatedFunction, fields: dict[str, Any], response: str, error: Unanswered) -> None:
        """Blame the row or the `response` for `error`; a row is reported and scores 0.0."""
        assert self._trial is not None
        self._tried[str(fields)] = None
        try:
            if response != self._trial.response:
                function("", self._trial.response, fields)
                return
        except Unanswered as again:
            error = again
        reason = f"the expected answer {str(next(iter(fields.values()))):.200} cannot be compared: {error}"
        self._tried[str(fields)] = reason
        if response != self._trial.response:
            print(f"{reason}; its row is set aside: every response to it scores 0", file=sys.stderr, flush=True)
