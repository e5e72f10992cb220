"""What becomes of a step whose numbers are not sound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit

Action = Literal["stop", "skip", "rollback"]


class KLGuardConfig(Section):
    """The policy has left the reference: `kl_mean` of the batch above `limit`."""

    limit: Annotated[float | None, Unit("nats a response")] = Field(
        None, gt=0, description="largest `kl_mean`, nats per response; null: none"
    )
    action: Action = Field(
        "stop", description="end the run, train nothing in this step, or go back to the last checkpoint"
    )


class RatioGuardConfig(Section):
    """The update has moved too far: `ratio_max` above `limit`."""

    limit: Annotated[float | None, Unit("factor")] = Field(
        None, gt=1, description="largest `ratio_max` of the update; null: none"
    )
    action: Action = Field("stop", description="end the run, take the update back, or go back to the last checkpoint")


class ESSGuardConfig(Section):
    """Too little is left of the batch: `ess` below `limit`."""

    limit: Annotated[float | None, Unit("share")] = Field(
        None, gt=0, lt=1, description="smallest `ess`, a share of the first minibatch's tokens; null: none"
    )
    action: Action = Field("stop", description="end the run, take the update back, or go back to the last checkpoint")


class GuardsConfig(Section):
    """What becomes of a step whose numbers are not sound: `stop` ends the run, `skip` trains nothing in the step,
    `rollback` goes back to the last checkpoint and goes on from there without the prompts admitted since.

    A skipped step leaves weights and optimizers of actor and critic as they were, on all ranks. See docs/guards.md.
    """

    non_finite: Action = Field(
        "stop",
        description="a score, log-prob, value, loss or gradient that is NaN or infinite: end the run, skip or go back",
    )
    kl_mean: KLGuardConfig = KLGuardConfig()
    ratio_max: RatioGuardConfig = RatioGuardConfig()
    ess: ESSGuardConfig = ESSGuardConfig()
    logprob_gap: Action = Field("stop", description="`ppo.logprob_gap_limit` is exceeded: end the run, skip or go back")
    max_skips: Annotated[int, Unit("steps")] = Field(
        3, ge=1, description="so many skipped steps in a row are allowed; one more ends the run"
    )
    max_rollbacks: Annotated[int, Unit("times")] = Field(
        2, ge=1, description="so many times a run may go back; a breach more ends it"
    )
    kept_batches: Annotated[int, Unit("batches")] = Field(
        8, ge=0, description="rejected batches written to `rejected/` for `oppo replay`: the first so many of the run"
    )

    def limits(self, gap_limit: float | None) -> dict[str, tuple[float, Action]]:
        """The rules that have a limit, and what follows where it is exceeded; `gap_limit` is that of the log-prob gap."""
        limits = {
            "kl_mean": (self.kl_mean.limit, self.kl_mean.action),
            "ratio_max": (self.ratio_max.limit, self.ratio_max.action),
            "ess": (self.ess.limit, self.ess.action),
            "logprob_gap": (gap_limit, self.logprob_gap),
        }
        return {rule: (limit, action) for rule, (limit, action) in limits.items() if limit is not None}

    def in_force(self, gap_limit: float | None) -> dict[str, Action]:
        """What follows from each rule that a step can break."""
        limited = {rule: action for rule, (_, action) in self.limits(gap_limit).items()}
        return {"non_finite": self.non_finite} | limited
