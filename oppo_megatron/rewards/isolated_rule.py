"""A rule of this package that may hang or crash over a response, in processes of its own, several at once."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.isolation import IsolatedFunction, Unanswered
from oppo_megatron.rewards.protocol import ScoreItem

Read = Callable[[Mapping[str, Any]], dict[str, Any]]
"""What the function needs of a row's columns.  Raises RewardError where the row lacks it."""


class IsolatedRule:
    """Asked as a service is: `request` hands in responses, `result` takes a score.

    A response that outruns the limits, or over which the process ends, has the score 0.0.  `make` gives a function for each
    of `processes` threads, which start with the first request: a process ends with the thread that has started it.
    """

    def __init__(
        self, make: Callable[[], IsolatedFunction], read: Read, processes: int, about: Callable[[], str] = str
    ):
        """`about` says in a line what a user should know before the run; nothing, if it is empty."""
        self._functions = [make() for _ in range(processes)]
        self._read, self.about = read, about
        self._scores: dict[int, Future[float]] = {}
        self._waiting: queue.SimpleQueue[tuple[ScoreItem, Future[float]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a response to this row could not be scored."""
        self._read(fields)

    def requested(self, seq_id: int) -> bool:
        """Whether the score of this sequence has been asked for and not yet taken."""
        return seq_id in self._scores

    def request(self, items: Sequence[ScoreItem]) -> None:
        """Ask for scores; returns at once.  A sequence that is being scored is not asked for again."""
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
        """The score of a sequence that was asked for; waits for it.  Raises RewardError where there is none."""
        return self._scores.pop(seq_id).result()

    def forget(self, seq_id: int) -> None:
        """Nobody takes the score of this sequence: the next one of this name is asked for anew."""
        self._scores.pop(seq_id, None)

    def close(self) -> None:
        """End threads and processes.  What has not been scored stays so."""
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
                score.set_result(self._score(function, item))
            except Exception as error:  # for whoever takes the score
                score.set_exception(error)
        function.close()

    def _score(self, function: IsolatedFunction, item: ScoreItem) -> float:
        fields = self._read(item.fields)
        try:
            score = function(item.prompt, item.response, fields)
        except Unanswered:
            return 0.0
        if math.isnan(score):
            raise RewardError(f"the expected answer {str(fields)[:200]} cannot be read; correct the row")
        return score
