from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.nesting import read_json
from oppo_megatron.schedule.actions import Op

_MOMENTS = 5
"""Sums of a kind: samples, n, t, n^2, n t."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds for n tokens: `fixed_s` + n * `per_token_s`."""

    fixed_s: float
    per_token_s: float

    def __call__(self, num_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.per_token_s


Lines = Linear | tuple[Linear, ...]
"""One line for all pipeline stages of a role, or one for each."""


def at_stage(lines: Lines, stage: int) -> Linear:
    return lines if isinstance(lines, Linear) else lines[stage]


@dataclass(frozen=True)
class Costs:
    """Seconds of one stage's actions on n sequences (`decode`, `sample`), tokens or output rows."""

    decode: Lines = Linear(2e-3, 5e-5)
    sample: Linear = Linear(2e-4, 1e-5)
    prefill: Mapping[str, Lines] = field(default_factory=dict)
    default_prefill: Linear = Linear(2e-3, 2e-5)
    score: Linear = Linear(1e-4, 1e-6)
    message_s: float = 5e-5

    def decode_at(self, stage: int) -> Linear:
        return at_stage(self.decode, stage)

    def prefill_at(self, role: str, stage: int) -> Linear:
        return at_stage(self.prefill_of(role), stage)

    def prefill_of(self, role: str) -> Lines:
        return self.prefill.get(role, self.default_prefill)


class CostMeter:
    """Fits `Costs` to measured seconds by least squares; vectors of ranks can be added."""

    MIN_SAMPLES = 4

    def __init__(self, stages: Mapping[str, int], vector: Sequence[float] | None = None):
        """`stages` of every role, in the same order on every rank."""
        self.stages = dict(stages)
        kinds = [_kind(Op.SAMPLE), _kind(Op.SCORE)]
        kinds += [_kind(Op.DECODE, "actor", stage) for stage in range(self.stages["actor"])]
        kinds += [_kind(Op.PREFILL, role, stage) for role, pp in self.stages.items() for stage in range(pp)]
        values = [0.0] * (_MOMENTS * len(kinds)) if vector is None else list(vector)
        if len(values) != _MOMENTS * len(kinds):
            raise ValueError(
                f"{len(values)} sums for roles of {self.stages} stages; give {_MOMENTS * len(kinds)}, "
                "from a meter of the same roles"
            )
        self._sums = {kind: values[_MOMENTS * i : _MOMENTS * (i + 1)] for i, kind in enumerate(kinds)}

    def add(self, op: Op, role: str, stage: int, num_tokens: int, seconds: float) -> None:
        sums = self._sums[_kind(op, role, stage)]
        n, t = float(num_tokens), seconds
        for i, moment in enumerate((1.0, n, t, n * n, n * t)):
            sums[i] += moment

    def join(self, vector: Sequence[float], keep: float = 1.0) -> None:
        """Add another meter's sums; own ones are weighted by `keep`."""
        for i, sums in enumerate(self._sums.values()):
            other = vector[_MOMENTS * i : _MOMENTS * (i + 1)]
            sums[:] = [keep * own + new for own, new in zip(sums, other, strict=True)]

    def take(self) -> list[float]:
        vector = self.to_vector()
        self.join([0.0] * len(vector), keep=0.0)
        return vector

    @property
    def empty(self) -> bool:
        return not any(self.to_vector())

    def to_vector(self) -> list[float]:
        return [value for sums in self._sums.values() for value in sums]

    def costs(self, fallback: Costs) -> Costs:
        """A stage without samples gets its role's line, else the line of `fallback`; few samples scale it to their mean."""
        prefill = {role: self._by_stage(Op.PREFILL, role, fallback.prefill_of(role)) for role in self.stages}
        return Costs(
            decode=self._by_stage(Op.DECODE, "actor", fallback.decode),
            sample=_fit(self._sums[_kind(Op.SAMPLE)], fallback.sample),
            prefill={**fallback.prefill, **prefill},
            default_prefill=fallback.default_prefill,
            score=_fit(self._sums[_kind(Op.SCORE)], fallback.score),
            message_s=fallback.message_s,
        )

    def _by_stage(self, op: Op, role: str, fallback: Lines) -> tuple[Linear, ...]:
        own = [self._sums[_kind(op, role, stage)] for stage in range(self.stages[role])]
        joined = [sum(column) for column in zip(*own, strict=True)]
        return tuple(_fit(sums, _fit(joined, at_stage(fallback, stage))) for stage, sums in enumerate(own))


def _kind(op: Op, role: str = "", stage: int = 0) -> tuple[Op, str, int]:
    return (op, role, stage) if op in (Op.DECODE, Op.PREFILL) else (op, "", 0)


def _fit(sums: Sequence[float], fallback: Linear) -> Linear:
    count, n, t, nn, nt = sums
    if count == 0:
        return fallback
    mean_n, mean_t = n / count, t / count
    variance = nn / count - mean_n**2
    if count < CostMeter.MIN_SAMPLES or variance <= 1e-6 * mean_n**2:
        expected = fallback(round(mean_n))
        scale = mean_t / expected if expected > 0 else 0.0
        return Linear(scale * fallback.fixed_s, scale * fallback.per_token_s)
    slope = (nt / count - mean_n * mean_t) / variance
    if slope <= 0:
        return Linear(mean_t, 0.0)
    fixed = mean_t - slope * mean_n
    return Linear(fixed, slope) if fixed >= 0 else Linear(0.0, nt / nn)


EXAMPLE = '{"decode": [0.002, 5e-5], "prefill": {"critic": [0.002, 2e-5]}, "message_s": 5e-5}'
MOST_SECONDS = 1e6
LINES = ("sample", "default_prefill", "score")


def read_costs(path: Path, placements: Mapping[str, RolePlacement]) -> Costs:
    """Read pairs (fixed, per token) of seconds, of all stages or of each. Raises ConfigError with every problem."""
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
    by_role = {role: _lines(f"{path}: prefill of {role}", value, stages.get(role), problems) for role, value in prefill.items()}
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
            problems.append(f"{name} is of {len(value)} stages, but the role has pp {stages}; give one pair, or {stages}")
        return tuple(_line(f"{name} at stage {stage}", pair, problems) for stage, pair in enumerate(value))
    return _line(name, value, problems)


def _line(name: str, pair: Any, problems: list[str]) -> Linear:
    if isinstance(pair, list) and len(pair) == 2 and all(map(_is_seconds, pair)):
        return Linear(float(pair[0]), float(pair[1]))
    problems.append(f"{name} is {pair!r}; give two numbers of seconds, 0 to {MOST_SECONDS:g}: [fixed, per token]")
    return Linear(0.0, 0.0)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_SECONDS
