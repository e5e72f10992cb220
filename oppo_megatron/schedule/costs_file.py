"""Costs in a JSON file, as measured on some machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oppo_megatron.errors import ConfigError
from oppo_megatron.schedule.costs import Costs, Linear

EXAMPLE = '{"decode": [0.002, 5e-5], "prefill": {"critic": [0.002, 2e-5]}, "message_s": 5e-5}'
LINES = ("decode", "sample", "default_prefill", "score")


def read_costs(path: Path) -> Costs:
    """The costs in `path`: pairs of seconds, fixed and per token; what is missing has its default.

    Keys are `decode`, `sample`, `score`, `default_prefill`, `prefill` (a pair for each role) and `message_s`.
    Raises ConfigError with every problem.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; costs are JSON, as in {EXAMPLE}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}; costs are a JSON object, as in {EXAMPLE}")
    problems: list[str] = []
    known = {*LINES, "prefill", "message_s"}
    problems += [f"{path}: `{key}` is no cost; the keys are {sorted(known)}" for key in tree if key not in known]
    lines = {key: _line(f"{path}: {key}", tree[key], problems) for key in LINES if key in tree}
    prefill = tree.get("prefill", {})
    if not isinstance(prefill, Mapping):
        problems.append(f"{path}: prefill is {prefill!r}; give a pair for each role, as in {EXAMPLE}")
        prefill = {}
    by_role = {role: _line(f"{path}: prefill of {role}", pair, problems) for role, pair in prefill.items()}
    message_s = tree.get("message_s", Costs().message_s)
    if not _is_seconds(message_s):
        problems.append(f"{path}: message_s is {message_s!r}; give seconds, 0 or more")
    if problems:
        raise ConfigError(problems)
    return Costs(**lines, prefill=by_role, message_s=float(message_s))


def _line(name: str, pair: Any, problems: list[str]) -> Linear:
    if isinstance(pair, list) and len(pair) == 2 and all(map(_is_seconds, pair)):
        return Linear(float(pair[0]), float(pair[1]))
    problems.append(f"{name} is {pair!r}; give two numbers of seconds, 0 or more: [fixed, per token]")
    return Linear(0.0, 0.0)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
