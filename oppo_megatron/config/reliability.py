"""Settings of checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


class CheckpointConfig(Section):
    """The state of a run in `checkpoints/`, from which `--resume` continues exactly."""

    every_steps: int = Field(0, ge=0, description="steps from one checkpoint to the next; 0: as `every_minutes` says")
    every_minutes: Annotated[float, Unit("minutes")] = Field(
        15.0, ge=0, description="save after the first step that ends this long after the last checkpoint; 0: never"
    )
    final: bool | Literal["nothing"] = Field(
        True,
        description="save after the last step, so that the run can be given more steps later; false: only the final "
        "weights are written; nothing: not even these",
    )
    keep: Annotated[int, Unit("checkpoints")] = Field(2, ge=1, description="number of last checkpoints that are kept")
    keep_best: bool | str = Field(
        False,
        description="save after each step that is the best so far, keep that checkpoint too, and write its weights to "
        "`best/`; a text names the held-out metric that decides, as in `early_stop.metric`; true: the metric of "
        "`early_stop`, else the first of `evaluation` (supervised training: `loss`); if `oppo train` has neither, `reward`, "
        "the mean reward of a step, among the saved steps",
    )
    asynchronous: bool = Field(
        False,
        description="the run waits only until the checkpoint's content has been copied (host memory must hold the "
        "weights and optimizer states that this rank writes a second time); a thread writes the copy while the run "
        "continues",
    )
    resume: bool = Field(
        False, description="continue from the last whole checkpoint of `run_dir`, if it has one (`--resume`)"
    )

    @property
    def saves_end(self) -> bool:
        return self.final is True

    @property
    def writes_weights(self) -> bool:
        """True if the run writes weights to `weights/`, and to `best/` if a best step is kept."""
        return self.final != "nothing"


class TrainCheckpointConfig(CheckpointConfig):
    """The state of a PPO run in `checkpoints/`, from which `oppo train --resume` continues exactly."""

    caches: bool = Field(
        True,
        description="save the KV caches of sequences in flight, and use them: on the same layout the run continues to "
        "the bit; false: they are computed again, and the run continues up to rounding",
    )
