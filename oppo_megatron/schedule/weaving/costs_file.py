"""Read and write costs as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.nesting import read_json
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines

EXAMPLE = '{"decode": [0.002, 5e-5], "prefill": {"critic": [0.002, 2e-5]}, "message_s": 5e-5}'
MOST_SECONDS = 1e6
LINES = ("sample", "default_prefill", "score")


def read_costs(path: Path, placements: Mapping[str, RolePlacement]) -> Costs:
    """Read costs from `path`: pairs of seconds, fixed and per token; missing ones have their defaults.

    `decode` and a role's `prefill` are one pair for all pipeline stages, or a list with a pair per stage in `placements`. Raises
    ConfigError with every problem.
    """
    if not path.is_file():
        raise ConfigError(missing_path("the file of costs", path))
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; costs are JSON, as in {EXAMPLE}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}; costs are a JSON object, as in {EXAMPLE}")
    problems: list[str] = []
    known = {*LINES, "decode", "prefill", "message_s"}
    problems += [f"{path}: `{key}` is not a cost; the keys are {sorted(known)}" for key in tree if key not in known]
    lines = {key: _line(f"{path}: {key}", tree[key], problems) for key in LINES if key in tree}
    stages = {role: placement.pp for role, placement in placements.items()}
    decode: Lines = Costs().decode
    if "decode" in tree:
        decode = _lines(f"{path}: decode", tree["decode"], stages["actor"], problems)
    prefill = tree.get("prefill", {})
    if not isinstance(prefill, Mapping):
        problems.append(f"{path}: prefill is {prefill!r}; give a pair for each role, as in {EXAMPLE}")
        prefill = {}
    by_role = {
        role: _lines(f"{path}: prefill of {role}", value, stages.get(role), problems) for role, value in prefill.items()
    }
    message_s = tree.get("message_s", Costs().message_s)
    if not _is_seconds(message_s):
        problems.append(f"{path}: message_s is {message_s!r}; give seconds, 0 to {MOST_SECONDS:g}")
    if problems:
        raise ConfigError(problems)
    return Costs(decode, prefill=by_role, message_s=float(message_s), **lines)


def costs_tree(costs: Costs) -> dict[str, Any]:
    return {
        "decode": _pairs(costs.decode),
        "prefill": {role: _pairs(lines) for role, lines in costs.prefill.items()},
        **{key: _pairs(getattr(costs, key)) for key in LINES},
        "message_s": costs.message_s,
    }


def _pairs(lines: Lines) -> list[Any]:
    if isinstance(lines, Linear):
        return [lines.fixed_s, lines.per_token_s]
    return [_pairs(line) for line in lines]


def _lines(name: str, value: Any, stages: int | None, problems: list[str]) -> Lines:
    if isinstance(value, list) and value and all(isinstance(pair, list) for pair in value):
        if len(value) != (stages or len(value)):
            problems.append(
                f"{name} is of {len(value)} stages, but the role has pp {stages}; give one pair, or {stages}"
            )
        return tuple(_line(f"{name} at stage {stage}", pair, problems) for stage, pair in enumerate(value))
    return _line(name, value, problems)


def _line(name: str, pair: Any, problems: list[str]) -> Linear:
    if isinstance(pair, list) and len(pair) == 2 and all(map(_is_seconds, pair)):
        return Linear(float(pair[0]), float(pair[1]))
    problems.append(f"{name} is {pair!r}; give two numbers of seconds, 0 to {MOST_SECONDS:g}: [fixed, per token]")
    return Linear(0.0, 0.0)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_SECONDS
