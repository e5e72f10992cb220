"""How long actions take: the cost model that schedules are planned with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oppo_megatron.schedule.actions import Op

_MOMENTS = 5
"""Sums of a kind: samples, n, t, n^2, n t."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds of an action on `n` tokens: `fixed_s` + n * `per_token_s`."""

    fixed_s: float
    per_token_s: float

    def __call__(self, num_tokens: int) -> float:
        return self.fixed_s + num_tokens * self.per_token_s


@dataclass(frozen=True)
class Costs:
    """Seconds of one pipeline stage's actions.  `prefill` is by role; a role that is missing costs `default_prefill`.

    `decode` and `sample` are of a micro-step (n sequences), `score` of n output rows, `message_s` of any message.
    """

    decode: Linear = Linear(2e-3, 5e-5)
    sample: Linear = Linear(2e-4, 1e-5)
    prefill: Mapping[str, Linear] = field(default_factory=dict)
    default_prefill: Linear = Linear(2e-3, 2e-5)
    score: Linear = Linear(1e-4, 1e-6)
    message_s: float = 5e-5

    def prefill_of(self, role: str) -> Linear:
        return self.prefill.get(role, self.default_prefill)


class CostMeter:
    """Fits `Costs` to measured times, by least squares over (tokens, seconds) of each kind of action.

    It keeps sums only, so ranks can join what they saw: add the vectors of all, then `CostMeter(roles, sums).costs(...)`.
    `score` is one kind whatever the role.
    """

    MIN_SAMPLES = 4

    def __init__(self, roles: Sequence[str], vector: Sequence[float] | None = None):
        """`roles` are those that prefill, in an order that is the same on every rank."""
        self._kinds = ["decode", "sample", "score", *(f"prefill {role}" for role in roles)]
        self._roles = tuple(roles)
        values = [0.0] * (_MOMENTS * len(self._kinds)) if vector is None else list(vector)
        if len(values) != _MOMENTS * len(self._kinds):
            raise ValueError(
                f"{len(values)} sums for {len(roles)} roles; give {_MOMENTS * len(self._kinds)}, "
                "from a meter of the same roles"
            )
        self._sums = {kind: values[_MOMENTS * i : _MOMENTS * (i + 1)] for i, kind in enumerate(self._kinds)}

    def add(self, op: Op, role: str, num_tokens: int, seconds: float) -> None:
        """One executed action; `num_tokens` is the n of `Costs`: sequences, new tokens or output rows."""
        sums = self._sums[f"prefill {role}" if op is Op.PREFILL else op.value]
        n, t = float(num_tokens), seconds
        for i, moment in enumerate((1.0, n, t, n * n, n * t)):
            sums[i] += moment

    def forget(self, keep: float) -> None:
        """Let what was seen so far count `keep` times as much (0 .. 1) as what comes; once a PPO step."""
        for sums in self._sums.values():
            sums[:] = [keep * value for value in sums]

    def to_vector(self) -> list[float]:
        """The sums, in a fixed order and number for given roles."""
        return [value for kind in self._kinds for value in self._sums[kind]]

    def costs(self, fallback: Costs) -> Costs:
        """The fitted costs; `fallback` for messages, and where a kind has fewer than `MIN_SAMPLES` samples.

        Where all samples have the same n, the fallback's line is scaled to pass through their mean.
        """
        prefill = {role: self._fit(f"prefill {role}", fallback.prefill_of(role)) for role in self._roles}
        return Costs(
            decode=self._fit("decode", fallback.decode),
            sample=self._fit("sample", fallback.sample),
            prefill={**fallback.prefill, **prefill},
            default_prefill=fallback.default_prefill,
            score=self._fit("score", fallback.score),
            message_s=fallback.message_s,
        )

    def _fit(self, kind: str, fallback: Linear) -> Linear:
        count, n, t, nn, nt = self._sums[kind]
        if count < self.MIN_SAMPLES:
            return fallback
        mean_n, mean_t = n / count, t / count
        variance = nn / count - mean_n**2
        if variance <= 1e-6 * mean_n**2:
            expected = fallback(round(mean_n))
            scale = mean_t / expected if expected > 0 else 0.0
            return Linear(scale * fallback.fixed_s, scale * fallback.per_token_s)
        slope = (nt / count - mean_n * mean_t) / variance
        if slope <= 0:
            return Linear(mean_t, 0.0)
        fixed = mean_t - slope * mean_n
        return Linear(fixed, slope) if fixed >= 0 else Linear(0.0, nt / nn)
