"""Rules of the parts of a reward: each has the settings that its kind needs, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import get_args
from urllib.parse import urlsplit

from oppo_megatron.config.data import RULE_WALL_S, RewardPart, RuleName
from oppo_megatron.config.remote import START_S

OWNER = {
    "step_rewards": "process",
    "separator": "process",
    "name": "verifier",
    "entry_point": "python",
    "options": "python",
    "isolate": "python",
    "url": "http",
    "token_env": "http",
    "remote": "http",
}
RULE_OF = {
    "lenient": ("gsm8k", "format", "code"),
    "pattern": ("format",),
    "buffer_tokens": ("length",),
    "max_tokens": ("length",),
    "processes": ("math", "code"),
}
"""Settings of kind verifier, and the verifiers that read them."""
_ENTRY_POINT = re.compile(r"(?:[\w.]+|.+\.py):[\w.]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_part(name: str, part: RewardPart) -> list[str]:
    """Every broken rule of the part at `name`.  No message repeats a value that may be a misplaced secret."""
    problems = list(_misplaced(name, part))
    if part.kind == "verifier" and part.name is None:
        problems.append(f"{name} is a verifier without a `name`; add one of {', '.join(get_args(RuleName))}")
    if part.name == "format" and part.pattern is None:
        problems.append(
            f"{name} is a rule `format` without a `pattern`; add a regular expression for the whole response"
        )
    if part.name == "length" and part.buffer_tokens is None:
        problems.append(
            f"{name} is a rule `length` without `buffer_tokens`; add over how many tokens before the longest response it falls"
        )
    if part.kind == "python" and not _ENTRY_POINT.fullmatch(part.entry_point or ""):
        problems.append(
            f"{name}.entry_point is {part.entry_point!r}, but must be `package.module:function` or "
            "`folder/file.py:function`; name the function"
        )
    if part.kind == "http":
        problems += [*_check_url(f"{name}.url", part.url), *_check_remote(name, part)]
    return problems


def check_rewards(parts: Sequence[RewardPart], *, has_reward_model: bool) -> list[str]:
    """Rules of all parts; the reward model is there if and only if it is used."""
    problems = [problem for index, part in enumerate(parts) for problem in check_part(f"rewards.{index}", part)]
    if all(part.weight == 0 for part in parts):
        problems.append(
            "every part of rewards has weight 0, so that every reward is 0 and nothing is learned; give one another weight"
        )
    num_models = sum(part.reads_model for part in parts)
    if num_models > 1:
        problems.append(f"rewards names the reward model {num_models} times, but once is allowed; add their weights up")
    if num_models and not has_reward_model:
        problems.append(
            "rewards has a part of kind model or process, but there is no `reward` section; add it with the model's checkpoint"
        )
    if has_reward_model and not num_models:
        problems.append(
            "a `reward` section is given, but no part of rewards has kind model or process; add `- kind: model` or remove it"
        )
    return problems


def check_waits(parts: Sequence[RewardPart], timeout_s: float, stall_s: float = 0.0) -> Iterator[str]:
    """A rank that waits for a reward must give up before its peers' timeout and the watchdog's deadline (0: no watchdog)."""
    limits = [("the other ranks wait only runtime.timeout_s", timeout_s)]
    limits += [("a rank that does not move is ended after stall_deadline_s", stall_s)] if stall_s else []
    for index, part in enumerate(parts):
        longest_s, what = _longest_wait(part)
        for who, limit_s in limits:
            if longest_s >= limit_s:
                yield (
                    f"rewards.{index} may wait {longest_s:g} s for {what}, but {who} {limit_s:g}; lower the former or raise "
                    "the latter"
                )


def _longest_wait(part: RewardPart) -> tuple[float, str]:
    """The seconds that a reward may take by its own limits, and the names of these."""
    if part.kind == "http":
        remote = part.remote
        return remote.give_up_s + remote.timeout_s, "its service (remote.give_up_s + remote.timeout_s)"
    if part.isolation is not None:
        return START_S + part.isolation.wall_s, f"its function ({START_S:g} to start, and isolate.wall_s)"
    return 0.0, ""


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
    for key, rules in RULE_OF.items():
        if _is_given(part, key) and part.name not in rules:
            is_now = f"rule {part.name}" if part.name else f"kind {part.kind}"
            yield f"{name} is of {is_now} and has {key}, but only rule {' or '.join(rules)} takes it; remove it"


def _is_given(part: RewardPart, key: str) -> bool:
    """True if it differs from the default, which a resolved configuration writes out."""
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


def _check_remote(name: str, part: RewardPart) -> Iterator[str]:
    if part.token_env is not None and not _VARIABLE.fullmatch(part.token_env):
        yield f"{name}.token_env is not the name of an environment variable; give the name, and never the token itself"
