"""Settings of checkpoints, and of what happens where a run is told to stop or stands still."""

from __future__ import annotations

from typing import Annotated, Literal

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
    keep_best: bool = Field(
        False, description="save after each step that is the best so far, keep that one, too, and write its weights to `best/`"
    )
    best_metric: str | None = Field(
        None,
        description="the held-out metric that names the best step; null: that of `early_stop`, else the first of `evaluation` "
        "(of sft and rm `loss`); without one, of `oppo train`: `reward`, the mean reward of a step, among those that are saved",
    )
    best_mode: Literal["max", "min"] | None = Field(
        None, description="whether higher or lower is better; null: lower for `loss` and `truncated`, higher for others"
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


class PreemptConfig(Section):
    """SIGTERM, SIGUSR1 or SIGINT (Ctrl-C): the run is saved after the chunk under way, and ends with exit code 75."""

    enabled: bool = Field(True, description="false: SIGTERM and Ctrl-C end the run at once")
    deadline_s: float = Field(
        120.0, gt=0, description="a run that could not be saved within so many seconds ends unsaved"
    )


class StallConfig(Section):
    """A run that stands still is ended: every rank writes the stacks of its threads to `stacks/`, and says what it waited for."""

    deadline_s: float = Field(
        900.0,
        ge=0,
        description="a rank that gives no sign of life for so many seconds, or that neither moves nor waits for another, or all "
        "ranks without a move, end the run; it must be longer than the longest single piece of work: reading a model's "
        "weights, saving or reading a checkpoint, a micro-batch of an update, a call of a reward function; 0: no limit",
    )
