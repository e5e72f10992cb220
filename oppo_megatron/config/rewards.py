"""The parts of a reward, and their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import regex
from annotated_types import Ge
from pydantic import Field, StrictInt, field_validator

from oppo_megatron.config.base import IMPORT_PATH, Section, Unit
from oppo_megatron.config.data import STEP_SEPARATOR

START_S = 60.0
"""Time limit for starting an isolated function's process and importing its module."""


TIMEOUT_S, MEMORY_MB = 30.0, 4096


@dataclass(frozen=True)
class Limits:
    """Limits of the process of a reward function: of a call, in wall-clock and processor seconds, and of the address space.

    They contain accidents, not attackers: this is not a sandbox.
    """

    wall_s: float = TIMEOUT_S
    memory_mb: int = MEMORY_MB


RuleName = Literal["arithmetic", "gsm8k", "gsm8k_first", "math", "multiple_choice", "format", "length", "code"]

RULE_WALL_S = {"math": 5.0, "code": 10.0}
"""The rules that run in processes of their own, and the time limit of a response."""


class RewardPart(Section):
    """One summand of the reward: `weight` times the number that `kind` gives for a finished response.

    kind: `model` the reward model's scalar; `process` a process reward model's scores of the steps (docs/process_rewards.md);
    `verifier` a rule by `name`; most rules compare with column `answer`; `python` a function `entry_point` =
    `package.module:function` or `file.py:function`, called with (prompt, response, fields); `http` a reward service at `url`
    (docs/rewards.md).
    """

    kind: Literal["model", "process", "verifier", "python", "http"] = Field(
        ..., description="source of the number: the reward model, a process reward model, a rule, a function, a service"
    )
    weight: Annotated[float, Unit("factor")] = Field(1.0, description="factor of this part in the sum")
    name: RuleName | None = Field(None, description="the rule (verifier)")
    answer: str = Field(
        "answer",
        description="column with the expected answer, for rule `code` the tests; `a.b` is key `b` of the "
        "objects in column `a` (verifier)",
    )
    lenient: bool = Field(
        False,
        description="accept the last number if no answer is marked (rule `gsm8k`), a match of the pattern "
        "anywhere (rule `format`), or score the share of passed tests (rule `code`)",
    )
    pattern: str | None = Field(None, description="regular expression; `.` matches newlines (rule `format`)")
    buffer_tokens: int | None = Field(
        None, ge=1, description="the penalty grows from 0 to -1 over the last tokens before `max_tokens` (rule `length`)"
    )
    max_tokens: int | None = Field(
        None, ge=1, description="length from which the penalty is -1; null: `rollout.max_response_tokens` (rule `length`)"
    )
    entry_point: str | None = Field(None, description="`package.module:function` or `folder/file.py:function` (python)")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the entry point")
    isolate: Annotated[bool | Annotated[StrictInt, Ge(64)], Unit("MiB")] = Field(
        False,
        description="call it in its own process; a number limits the process's address space, true: 4096 (python; the "
        "rules `math` and `code` always have processes)",
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        description="time limit of a request (http), or of a call in its own process, in wall-clock and processor seconds; "
        "null: 30, for rule `math` 5, for rule `code` 10",
    )
    give_up_s: float = Field(
        600.0,
        ge=0,
        description="a failed request is sent again; the run ends after this long without an answer; 0: at the first failure "
        "(http)",
    )
    url: str | None = Field(None, description="address to which responses are posted: `http://HOST:PORT/score` (http)")
    token_env: str | None = Field(None, description="environment variable with the bearer token (http)")
    step_rewards: Literal["last", "min", "sum", "potential"] = Field(
        "last",
        description="reward made of the steps' scores p_k: the last or the lowest one, at the last token; "
        "sum: p_k at the end of step k; potential: p_k - p_(k-1) there, which sums to the last score (process)",
    )
    separator: str = Field(STEP_SEPARATOR, min_length=1, description="text between two steps (process)")

    @property
    def reads_model(self) -> bool:
        """True if the run's reward model scores."""
        return self.kind in ("model", "process")

    @field_validator("pattern")
    @classmethod
    def _readable(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_pattern(pattern)
        return pattern

    @property
    def isolation(self) -> Limits | None:
        """Limits of its own process, if any."""
        usual_s = RULE_WALL_S.get(self.name or "")
        if usual_s is None and not self.isolate:
            return None
        return Limits(self.timeout_s or usual_s or TIMEOUT_S, MEMORY_MB if isinstance(self.isolate, bool) else self.isolate)

    @property
    def request_s(self) -> float:
        """Time limit of a request and its answer."""
        return self.timeout_s or TIMEOUT_S


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Raises ValueError for an invalid pattern."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"a regular expression ({error})") from error


OWNER = {
    "step_rewards": "process",
    "separator": "process",
    "name": "verifier",
    "entry_point": "python",
    "options": "python",
    "isolate": "python",
    "url": "http",
    "token_env": "http",
    "give_up_s": "http",
}
RULE_OF = {
    "lenient": ("gsm8k", "format", "code"),
    "pattern": ("format",),
    "buffer_tokens": ("length",),
    "max_tokens": ("length",),
}
"""Settings of kind verifier, and the verifiers that read them."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_part(name: str, part: RewardPart) -> list[str]:
    """Every broken rule; no message repeats a value that may be secret."""
    problems = list(_misplaced(name, part))
    if part.kind == "verifier" and part.name is None:
        problems.append(f"{name} is a verifier without a `name`; add one of {', '.join(get_args(RuleName))}")
    if part.name == "format" and part.pattern is None:
        problems.append(f"{name} is a rule `format` without a `pattern`; add a regular expression for the whole response")
    if part.name == "length" and part.buffer_tokens is None:
        problems.append(
            f"{name} is a rule `length` without `buffer_tokens`; add over how many tokens before the longest response it falls"
        )
    if part.kind == "python" and not IMPORT_PATH.fullmatch(part.entry_point or ""):
        problems.append(
            f"{name}.entry_point is {part.entry_point!r}, but must be `package.module:function` or "
            "`folder/file.py:function`; name the function"
        )
    if part.kind == "http":
        problems += _check_url(f"{name}.url", part.url)
        if part.token_env is not None and not _VARIABLE.fullmatch(part.token_env):
            problems.append(f"{name}.token_env is not the name of an environment variable; give the name, not the token itself")
    return problems


def check_rewards(parts: Sequence[RewardPart], *, has_reward_model: bool) -> list[str]:
    problems = [problem for index, part in enumerate(parts) for problem in check_part(f"rewards.{index}", part)]
    if all(part.weight == 0 for part in parts):
        problems.append("every part of rewards has weight 0, so every reward is 0 and nothing is learned; give one a weight")
    num_models = sum(part.reads_model for part in parts)
    if num_models > 1:
        problems.append(f"rewards names the reward model {num_models} times, but once is allowed; add their weights up")
    if num_models and not has_reward_model:
        problems.append("rewards has a part of kind model or process, but `reward` is missing; add it with its checkpoint")
    if has_reward_model and not num_models:
        problems.append(
            "a `reward` section is given, but no part of rewards has kind model or process; add `- kind: model` or remove it"
        )
    return problems


def check_waits(parts: Sequence[RewardPart], timeout_s: float, stall_s: float = 0.0) -> Iterator[str]:
    """Waits must be shorter than the peers' timeout and the watchdog's deadline (0: none)."""
    limits = [("the other ranks wait only runtime.timeout_s", timeout_s)]
    limits += [("a rank that does not move is ended after stall_deadline_s", stall_s)] if stall_s else []
    for index, part in enumerate(parts):
        if part.kind == "http":
            longest_s, what = part.give_up_s + part.request_s, "its service (give_up_s + timeout_s)"
        elif part.isolation is not None:
            longest_s, what = START_S + part.isolation.wall_s, f"its function ({START_S:g} to start, and timeout_s)"
        else:
            continue
        for who, limit_s in limits:
            if longest_s >= limit_s:
                yield (
                    f"rewards.{index} may wait {longest_s:g} s for {what}, but {who} {limit_s:g}; lower the former or raise "
                    "the latter"
                )


def _misplaced(name: str, part: RewardPart) -> Iterator[str]:
    wrong = [key for key, kind in OWNER.items() if kind != part.kind and _is_given(part, key)]
    if part.kind == "verifier" and part.name in RULE_WALL_S and "isolate" in wrong:
        wrong.remove("isolate")
    if "name" in wrong:
        yield f"{name}.name is {part.name!r}, but kind {part.kind} has no rule to name; remove it"
    for kind in ("process", "python", "http"):
        keys = [key for key in wrong if OWNER[key] == kind]
        if keys:
            yield (f"{name} has {' and '.join(keys)}, but only kind {kind} takes them; remove them or change the kind")
    if part.timeout_s is not None and part.kind != "http" and part.isolation is None:
        yield f"{name} has timeout_s, but only kind http, a function with isolate, and the rules math and code take it; remove it"
    for key, rules in RULE_OF.items():
        if _is_given(part, key) and part.name not in rules:
            is_now = f"rule {part.name}" if part.name else f"kind {part.kind}"
            yield f"{name} is of {is_now} and has {key}, but only rule {' or '.join(rules)} takes it; remove it"


def _is_given(part: RewardPart, key: str) -> bool:
    """True if not the default, which a resolved configuration writes out."""
    return bool(getattr(part, key) != RewardPart.model_fields[key].get_default(call_default_factory=True))


def _check_url(name: str, url: str | None) -> Iterator[str]:
    if url is None:
        yield f"{name} is missing, but kind http needs it; write `url: http://HOST:PORT/score`"
        return
    remedy = "write `http://HOST:PORT/path` or https"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if "@" in url:
        yield f"{name} has a user name or password, and would be kept in the run directory; remove it, use token_env"
    elif valid and (parts.query or parts.fragment):
        yield f"{name} has a query or fragment, which may hold a secret and would be kept; {remedy}, and use token_env"
    elif not valid or not url.isprintable() or " " in url:
        yield f"{name} is {url!r}, which is not the address of a service; {remedy}"


def part_labels(parts: Sequence[RewardPart]) -> list[str]:
    """Names of parts in metrics and errors."""
    labels: list[str] = []
    for part in parts:
        address = (part.url or "").partition("://")[2]
        named = {"verifier": part.name, "python": part.entry_point, "http": address}
        name = named.get(part.kind, part.kind) or ""
        labels.append(name if name not in labels else f"{name}#{len(labels) + 1}")
    return labels
