"""How long actions take: the cost model that schedules are planned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
