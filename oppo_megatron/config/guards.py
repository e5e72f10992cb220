"""What becomes of a step whose numbers are not sound."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from oppo_megatron.config.base import Section

Action = Literal["stop", "skip"]


class KLGuardConfig(Section):
    """The policy has left the reference: `kl_mean` of the batch above `limit`."""

    limit: float | None = Field(None, gt=0, description="largest `kl_mean`, nats per response; null: none")
    action: Action = Field("stop", description="end the run, or train nothing in this step")


class RatioGuardConfig(Section):
    """The update has moved too far: `ratio_max` above `limit`."""

    limit: float | None = Field(None, gt=1, description="largest `ratio_max` of the update; null: none")
    action: Action = Field("stop", description="end the run, or take the update back")


class ESSGuardConfig(Section):
    """Too little is left of the batch: `ess` below `limit`."""

    limit: float | None = Field(
        None, gt=0, lt=1, description="smallest `ess`, a share of the first minibatch's tokens; null: none"
    )
    action: Action = Field("stop", description="end the run, or take the update back")


class GuardsConfig(Section):
    """What becomes of a step whose numbers are not sound: `stop` ends the run, `skip` trains nothing in the step.

    A skipped step leaves weights and optimizers of actor and critic as they were, on all ranks. See docs/guards.md.
    """

    non_finite: Action = Field(
        "stop", description="a score, log-prob, value, loss or gradient that is NaN or infinite: end the run, or skip"
    )
    kl_mean: KLGuardConfig = KLGuardConfig()
    ratio_max: RatioGuardConfig = RatioGuardConfig()
    ess: ESSGuardConfig = ESSGuardConfig()
    logprob_gap: Action = Field("stop", description="`ppo.logprob_gap_limit` is exceeded: end the run, or skip")
    max_skips: int = Field(3, ge=1, description="so many skipped steps in a row are allowed; one more ends the run")
    kept_batches: int = Field(
        8, ge=0, description="guilty batches written to `guilty/` for `oppo replay`: the first so many of the run"
    )
