"""Rules as parts of a reward; those that may hang or crash run in several processes."""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from oppo_megatron.clock import ByTime
from oppo_megatron.config.rewards import Limits, RewardPart, compile_pattern
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.records import TypedText, field_at, field_names, nearest_field
from oppo_megatron.rewards.isolation import IsolatedFunction, Unanswered
from oppo_megatron.rewards.parts import Fields, Part, RulePart
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.rewards.rules import choices, code_tests, math_answers
from oppo_megatron.rewards.verifiers import expected_answer, format_score, length_score, verify

VERLS_ANSWER = "reward_model.ground_truth"
"""Expected answer in verl's layout, used without a column `answer`."""
END_S = 10.0
"""Time for rule `code`'s process to start and end the tests, in addition to the tests' own."""
OWN_MB = 2048
"""Least address space of that process itself."""


def column(fields: Fields, answer: str) -> Any:
    """The column `answer`, or verl's. Raises `RewardError` if missing."""
    for name in (answer, *([VERLS_ANSWER] if answer == "answer" else [])):
        with suppress(KeyError):
            value = field_at(fields, name)
            if isinstance(value, TypedText):
                raise RewardError(f"column {name!r} {value.fault}")
            return value
    names = list(field_names(fields))
    near = nearest_field([answer, "ground_truth"], names)
    named = f", the nearest is `answer: {near}`" if near else ""
    raise RewardError(
        f"the row has no column {answer!r} with the expected answer (it has: {', '.join(names) or 'none'}); name the column "
        f"in the verifier's `answer`{named}"
    )


def build_rule(part: RewardPart, environment: Mapping[str, str], max_response_tokens: int | None) -> Part:
    """Processes inherit `environment`. Raises ConfigError."""
    assert part.name is not None, "check_rewards asks for it"
    if part.name == "format":
        assert part.pattern is not None, "check_rewards asks for it"
        pattern = compile_pattern(part.pattern)
        return RulePart(lambda item, _: format_score(item.response, pattern, whole=not part.lenient))
    if part.name == "length":
        return RulePart(_length_rule(part, max_response_tokens))
    if part.isolation is not None:
        return _isolated_rule(part, part.isolation, environment)
    score: Callable[[str, Any], float] = partial(verify, "flexible" if part.lenient else part.name)
    expected: Callable[[Any], Any] = expected_answer
    if part.name == "multiple_choice":
        score, expected = choices.verify, choices.expected_letter
    return RulePart(
        lambda item, _: score(item.response, column(item.fields, part.answer)),
        lambda fields: expected(column(fields, part.answer)),
    )


def _length_rule(part: RewardPart, max_response_tokens: int | None) -> Callable[[Any, int | None], float]:
    most, buffer = part.max_tokens or max_response_tokens, part.buffer_tokens
    assert buffer is not None, "check_rewards asks for it"
    if most is None:
        raise ConfigError("rule length needs the longest response, which is not known here; add `max_tokens`")
    if buffer > most:
        raise ConfigError(f"buffer_tokens {buffer} of rule length is above its max_tokens {most}; lower it")
    if max_response_tokens is not None and most - buffer >= max_response_tokens:
        raise ConfigError(
            f"rule length begins at {most - buffer} tokens (max_tokens {most}, less buffer_tokens {buffer}), but no response has "
            f"more than rollout.max_response_tokens {max_response_tokens}; lower max_tokens, or leave it out"
        )

    def rate(item: Any, num_tokens: int | None) -> float:
        assert num_tokens is not None, "the caller of a rule `length` counts the tokens"
        return length_score(num_tokens, most, buffer)

    return rate


def _isolated_rule(part: RewardPart, limits: Limits, environment: Mapping[str, str]) -> IsolatedRule:
    if part.name == "math":
        math_answers.require_library()

        def expected(fields: Fields) -> dict[str, Any]:
            return {math_answers.ANSWER: math_answers.expected_text(column(fields, part.answer))}

        trial = Trial(math_answers.PROBE, math_answers.needs_library, math_answers.may_take_long)
        return IsolatedRule(lambda: IsolatedFunction(math_answers.ENTRY_POINT, {}, limits, environment), expected, trial=trial)

    options = {"wall_s": limits.wall_s, "memory_mb": limits.memory_mb, "partial_credit": part.lenient}
    outer = Limits(wall_s=limits.wall_s + END_S, memory_mb=max(limits.memory_mb, OWN_MB))

    def tests(fields: Fields) -> dict[str, Any]:
        return {code_tests.TESTS: code_tests.read_tests(column(fields, part.answer))}

    return IsolatedRule(
        lambda: IsolatedFunction(code_tests.ENTRY_POINT, options, outer, environment), tests, code_tests.about_network
    )


SHOWN = 5
PROCESSES = 4
"""Responses that are checked at once."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Tries expected answers by scoring `response`; NaN: comparable only as text. The library reads those that are `needed`,
    and may not come to an end over the `long` ones among them."""

    response: str
    needed: Callable[[Fields], bool]
    long: Callable[[Fields], bool]


class IsolatedRule(Part):
    """Scores 0.0 if a response exceeds the limits or ends the process. `read` returns the needed columns."""

    waits = True

    def __init__(
        self,
        make: Callable[[], IsolatedFunction],
        read: Callable[[Fields], dict[str, Any]],
        about: Callable[[], str] = str,
        trial: Trial | None = None,
    ):
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

    def unusable(self, rows: Sequence[Fields], tell: Callable[[str], None], *, every: bool) -> dict[int, str]:
        """Try each distinct expected answer; one that fails is tried again, as the machine may have been busy."""
        if self._trial is None:
            return {}
        read, doubtful = [self._read(fields) for fields in rows], self._trial.needed if every else self._trial.long
        tried = {str(fields): row for row, fields in zip(rows, read, strict=True) if doubtful(fields)}
        self.request([ScoreItem(-1 - i, "", self._trial.response, row) for i, row in enumerate(tried.values())])
        tell_by_time, texts = ByTime(tell), list[str]()
        for number, answer in enumerate(tried):
            if math.isnan(self.result(-1 - number)):
                texts.append(answer)
            self._tried.setdefault(answer, None)
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
        except Unanswered:
            if self._trial is not None and str(fields) not in self._tried:
                self._try(function, fields, self._trial.response, is_trial=item.response == self._trial.response)
            return 0.0

    def _try(self, function: IsolatedFunction, fields: dict[str, Any], response: str, *, is_trial: bool) -> None:
        """Blame the row, and not its response, if `response` fails, too; in a run it is named, and scores 0.0."""
        self._tried[str(fields)] = None
        try:
            function("", response, fields)
        except Unanswered as error:
            reason = f"the expected answer {str(next(iter(fields.values()))):.200} cannot be compared: {error}"
            self._tried[str(fields)] = reason
            if not is_trial:
                print(f"{reason}; every response to its row scores 0", file=sys.stderr, flush=True)
