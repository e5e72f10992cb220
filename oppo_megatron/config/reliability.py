"""Checkpoints, and guards: the reaction to a step with unsound numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from oppo_megatron.config.base import Section, Unit


class CheckpointConfig(Section):
    """The state of a run in `checkpoints/`, from which `--resume` continues exactly."""

    every_steps: int = Field(0, ge=0, description="steps from one checkpoint to the next; 0: as `every_minutes` says")
    every_minutes: Annotated[float, Unit("minutes")] = Field(15.0, ge=0, description="time between checkpoints; 0: never")
    final: bool | Literal["nothing"] = Field(
        True,
        description="save after the last step, so that the run can be given more steps later; false: only the "
        "final weights; nothing: not even these",
    )
    keep: Annotated[int, Unit("checkpoints")] = Field(2, ge=1, description="number of last checkpoints that are kept")
    keep_best: bool | str = Field(
        False,
        description="save after each step that is the best so far, keep that checkpoint too, and write its "
        "weights to `best/`; a text names the metric, as in `early_stop.metric`; true: the metric of `early_stop`, else the "
        "first of `evaluation` (supervised training: `loss`), else `reward`, the mean reward of a step",
    )
    asynchronous: bool = Field(
        False,
        description="the run waits only until the content has been copied in host memory; a thread writes the "
        "copy while the run continues",
    )

    @property
    def saves_end(self) -> bool:
        return self.final is True

    @property
    def writes_weights(self) -> bool:
        """True if the run writes `weights/`, and `best/` if a best step is kept."""
        return self.final != "nothing"


Action = Literal["stop", "skip", "rollback"]
APART = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats: largest difference of two computations of one token's log-prob, of the same weights in this type, in another order."""


class GuardsConfig(Section):
    """The reaction to numbers that are NaN or infinite, or beyond a limit (docs/guards.md).

    `stop` ends the run; `skip` undoes the update of actor and critic; `rollback` continues from the last checkpoint without the
    prompts admitted since.
    """

    action: Action = Field("stop", description="end the run, undo the step's update, or go back to the last checkpoint")
    kl_mean: Annotated[float | None, Unit("nats per response")] = Field(
        None, gt=0, description="largest `kl_mean` of a batch: beyond it the policy has left the reference; null: no limit"
    )
    ratio_max: Annotated[float | None, Unit("factor")] = Field(None, gt=1, description="largest `ratio_max`")
    ess: Annotated[float | None, Unit("share of the tokens")] = Field(
        None, gt=0, lt=1, description="smallest `ess`: below it too little is left of the batch; null: no limit"
    )
    logprob_gap: Annotated[PositiveFloat | Literal["auto"] | None, Unit("nats")] = Field(
        "auto",
        description="largest |logprob at decode - at training| of any token. auto: 1e-4 for a float32 actor; "
        "0.25 for bfloat16, because one rounding of a logit between 16 and 32 makes 0.125; doubled with each doubling "
        "of a token's largest logit beyond 32, divided by a temperature below 1, and up to four times that for one "
        "token in a thousand. null: no limit",
    )

    def gap_limit(self, dtype: str, temperature: float) -> float | None:
        """`logprob_gap` in numbers, by `dtype` and `temperature`."""
        if self.logprob_gap != "auto":
            return self.logprob_gap
        return APART[dtype] / (min(temperature, 1.0) or 1.0)
