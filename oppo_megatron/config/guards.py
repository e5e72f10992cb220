"""Guards: the reaction to a step with unsound numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from oppo_megatron.config.base import Section, Unit

Action = Literal["stop", "skip", "rollback"]
APART = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats: as far apart may two computations of one token's log-prob be, of the same weights in this type, in another order."""


class GuardConfig(Section):
    """A limit of a figure, and the reaction to a step beyond it."""

    limit: Annotated[float | None, Unit("of the figure")] = Field(
        None,
        gt=0,
        description="largest `kl_mean`, nats per response; largest `ratio_max` of the update, above 1; smallest `ess`, a share "
        "of the first minibatch's tokens, below 1; null: none",
    )
    action: Action = Field(
        "stop", description="end the run, undo the step's update, or go back to the last checkpoint"
    )


class GapGuardConfig(GuardConfig):
    """Decoding and training do not compute the same policy: |logprob at decode - at training| above `limit`."""

    limit: Annotated[PositiveFloat | Literal["auto"] | None, Unit("nats")] = Field(  # type: ignore[assignment]
        "auto",
        description="largest |logprob at decode - at training| of any token. auto: 1e-4 for a float32 actor; 0.25 for bfloat16, "
        "where one rounding of a logit between 16 and 32 makes 0.125; doubled with each doubling of a token's largest logit "
        "beyond 32, divided by a temperature below 1, and up to four times that for one token in a thousand. null: no limit",
    )

    def in_numbers(self, dtype: str, temperature: float) -> float | None:
        """`limit` for an actor of `dtype` that samples at `temperature`."""
        if self.limit != "auto":
            return self.limit
        return APART[dtype] / (min(temperature, 1.0) or 1.0)


class GuardsConfig(Section):
    """The reaction to a step with unsound numbers: `stop` ends the run, `skip` trains nothing in the step, `rollback` returns to
    the last checkpoint and continues without the prompts admitted since.

    A skipped step leaves weights and optimizers of actor and critic as they were, on all ranks. See docs/guards.md.
    """

    non_finite: Action = Field(
        "stop",
        description="a score, log-prob, value, loss or gradient is NaN or infinite: end the run, skip the step or go back",
    )
    kl_mean: GuardConfig = Field(
        GuardConfig(), description="the policy has left the reference: `kl_mean` of the batch above its limit"
    )
    ratio_max: GuardConfig = Field(GuardConfig(), description="the update has moved too far: `ratio_max` above its limit")
    ess: GuardConfig = Field(GuardConfig(), description="too little is left of the batch: `ess` below its limit")
    logprob_gap: GapGuardConfig = GapGuardConfig()

    def rules(self) -> Iterator[str]:
        """Yield a sentence for each limit that every figure is beyond."""
        if self.ratio_max.limit is not None and self.ratio_max.limit <= 1:
            yield f"guards.ratio_max.limit is {self.ratio_max.limit:g}, but must be greater than 1; raise it"
        if self.ess.limit is not None and self.ess.limit >= 1:
            yield f"guards.ess.limit is {self.ess.limit:g}, but must be less than 1; lower it"

    def limits(self, gap_limit: float | None) -> dict[str, tuple[float, Action]]:
        """The rules that have a limit, and their actions; `gap_limit` is the limit of the log-prob gap."""
        limits = {
            "kl_mean": (self.kl_mean.limit, self.kl_mean.action),
            "ratio_max": (self.ratio_max.limit, self.ratio_max.action),
            "ess": (self.ess.limit, self.ess.action),
            "logprob_gap": (gap_limit, self.logprob_gap.action),
        }
        return {rule: (limit, action) for rule, (limit, action) in limits.items() if limit is not None}

    def in_force(self, gap_limit: float | None) -> dict[str, Action]:
        """The action of each rule that a step can break."""
        limited = {rule: action for rule, (_, action) in self.limits(gap_limit).items()}
        return {"non_finite": self.non_finite} | limited
