"""Settings of checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit


class CheckpointConfig(Section):
    """The state of a run in `checkpoints/`, from which `--resume` continues exactly."""

    every_steps: int = Field(0, ge=0, description="save after every so many steps; 0: as `every_minutes` says")
    every_minutes: Annotated[float, Unit("minutes")] = Field(
        15.0, ge=0, description="save after a step that ends so long after the last checkpoint; 0: never"
    )
    final: bool = Field(True, description="save after the last step, so that the run can be given more steps later")
    keep: Annotated[int, Unit("checkpoints")] = Field(2, ge=1, description="checkpoints kept: the last so many")
    keep_best: bool | str = Field(
        False,
        description="save after each step that is the best so far, keep that one, too, and write its weights to `best/`; a text "
        "is the held-out metric that names the best step, as in `early_stop.metric`; true: that of `early_stop`, else the first "
        "of `evaluation` (of sft and rm `loss`); without one, of `oppo train`: `reward`, the mean reward of a step, among "
        "those that are saved",
    )
    asynchronous: bool = Field(
        False,
        description="the run waits only until what the checkpoint holds has been copied (a second time in the host's memory: "
        "weights and optimizer states that this rank writes); a thread writes it while the run goes on",
    )
    resume: bool = Field(
        False, description="continue from the last whole checkpoint of `run_dir`, where it has one (`--resume`)"
    )


class TrainCheckpointConfig(CheckpointConfig):
    """The state of a PPO run in `checkpoints/`, from which `oppo train --resume` continues exactly."""

    caches: bool = Field(
        True,
        description="save the KV caches of sequences in flight, and use them: on the same layout the run continues to the "
        "bit; false: they are computed again, and the run continues to rounding",
    )
