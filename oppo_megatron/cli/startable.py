"""Checks whether a run may start, or resume, in its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig
    from oppo_megatron.rundir.directory import RunDirectory


def require_startable(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> None:
    """Raise ConfigError if the run directory's content would be overwritten, or cannot be continued."""
    from oppo_megatron.config.paths import named_paths

    run.require_own()
    run.require_apart(named_paths(config))
    if config.checkpoint.resume:
        require_same_command(config, run)
    if not config.checkpoint.resume:
        run.require_unfinished()
        run.require_no_checkpoints()
    elif not ended_here(config, run):  # a run that has ended here needs no start, and that is not an error
        require_more_steps(config, run)


def require_same_command(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> None:
    """Raise ConfigError if the run to continue is of PPO and the configuration is not, or the reverse."""
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.errors import ConfigError

    wanted, wrote = "actor" if isinstance(config, TrainSettings) else "model", run.settings().keys()
    if wanted in wrote or not wrote & {"actor", "model"}:
        return
    theirs = "`oppo train`" if "actor" in wrote else "`oppo sft`, `rm`, `dpo` or `kto`"
    raise ConfigError(
        f"run_dir: {run.path} holds a run of {theirs}, which another command cannot continue; choose another run_dir, or give "
        "that command its own configuration"
    )


def require_more_steps(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> None:
    """Raise ConfigError if the finished run in its directory cannot be continued by this configuration."""
    from oppo_megatron.errors import ConfigError

    if not run.finished:
        return
    steps, ended = config.steps, run.ended_after
    if not run.has_checkpoints:
        raise ConfigError(
            f"run_dir: {run.path} holds a finished run without checkpoints (checkpoint.final was off), which cannot be given "
            "more steps; choose another run_dir, or start from its weights"
        )
    if steps is not None and ended is not None and steps <= ended:
        raise ConfigError(
            f"steps is {steps}, and the run in {run.path} has ended after {ended}: there is nothing to train; set steps to more "
            f"than {ended} to go on with it, or choose another run_dir"
        )


def ended_here(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> bool:
    """True if the run of this configuration has ended in its directory.

    A program that restarts a run until it ends needs this: the stop request may have come at the moment of the end.
    """
    from oppo_megatron.config.load import plain_settings

    then, now = run.settings(), plain_settings(config)
    if not (run.finished and then):
        return False
    unimportant = [("checkpoint", "resume")]
    if config.tokenizer.date is None:  # the run kept the date of its first start
        unimportant.append(("tokenizer", "date"))
    for tree in (then, now):
        for section, name in unimportant:
            if not isinstance(tree.get(section, {}), dict):
                return False
            tree.get(section, {}).pop(name, None)
    return bool(then == now)
