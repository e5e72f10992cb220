"""Common part of `oppo train` and of supervised training: load, check, then show the plan or launch the ranks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.kinds import require_kind
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.errors import EXIT_REQUEUE

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig, TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig
    from oppo_megatron.rundir.directory import RunDirectory

KINDS = ("train", "sft", "rm", "prm", "dpo", "kto")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides, --dry-run, and the options to continue a run."""
    add_config_arguments(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last whole checkpoint of run_dir, where it has one (checkpoint.resume=true)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="where a rank is killed or the run stands still, continue from the last whole checkpoint, up to N times",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the ranks, then stop"
    )


def run_kind(kind: str, args: argparse.Namespace) -> int:
    """Run one of `KINDS`: return the exit code.  Raises ConfigError before anything expensive starts."""
    from oppo_megatron.cli.launch import check_world_size, speaks_for_all
    from oppo_megatron.cli.rank_table import rank_table
    from oppo_megatron.config.load import config_yaml
    from oppo_megatron.layout.placements import world_size
    from oppo_megatron.rundir.directory import RunDirectory

    if getattr(args, "resume", False):
        args.overrides = [*args.overrides, "checkpoint.resume=true"]
    settings = load_settings(kind, args.config, args.overrides)
    if args.dry_run:
        config = placed(settings, measure=False)
        if config is None:
            print(config_yaml(settings), *unplaced(settings), sep="\n")
            return 0
        check_world_size(world_size(config))
        print(config_yaml(config), *rank_table(config), sep="\n")
        return 0
    run = RunDirectory(settings.run_dir)
    before = run.last_saved()
    code = start(kind, settings, args.max_restarts, getattr(args, "agent", "auto"))
    if code == EXIT_REQUEUE and speaks_for_all(os.environ):
        saved = "saved" if run.last_saved() != before else "not saved in time"
        print(f"oppo {kind}: {saved}; continue with: {_continuing(kind, args)}", file=sys.stderr, flush=True)
    return code


def start(kind: str, settings: TrainSettings | SupervisedConfig, restarts: int = 0, agent: str = "auto") -> int:
    """Check this machine, place the roles and launch the ranks of a checked configuration; return the exit code."""
    from oppo_megatron.cli.launch import check_world_size
    from oppo_megatron.cli.ready import require_ready
    from oppo_megatron.cli.startable import ended_here
    from oppo_megatron.layout.placements import world_size
    from oppo_megatron.rundir.directory import RunDirectory

    require_ready(settings, placed(settings, measure=False))
    config = placed(settings, measure=True)
    assert config is not None, "a measured placement is settled"
    check_world_size(world_size(config))
    run = RunDirectory(config.run_dir)
    if config.checkpoint.resume and ended_here(config, run):
        print(f"oppo {kind}: {run.path} holds this very run, and it has ended: nothing to do", file=sys.stderr)
        return 0
    config = with_date(config, run, datetime.now())
    tell_of_start(kind, config)
    return _launch(kind, config, restarts, agent)


def with_date(
    config: TrainConfig | SupervisedConfig, run: RunDirectory, now: datetime
) -> TrainConfig | SupervisedConfig:
    """Set the date of chat templates to the run's first start, so that all ranks and later attempts render the same prompts."""
    if config.tokenizer.date is not None:
        return config
    tokenizer = config.tokenizer.model_copy(update={"date": run.first_date(now)})
    return config.model_copy(update={"tokenizer": tokenizer})


def tell_of_start(kind: str, config: TrainConfig | SupervisedConfig) -> None:
    """Print the first line of a run, before slow imports: the number of ranks and the run directory."""
    from oppo_megatron.layout.placements import world_size

    if config.logging.console == "off" or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return
    size = world_size(config)
    told = f"starting {size} rank{'s' if size > 1 else ''}, run directory {config.run_dir}"
    print(f"oppo {kind}: {told}", file=sys.stderr, flush=True)


def _continuing(kind: str, args: argparse.Namespace) -> str:
    """Return the command that continues a stopped run."""
    overrides = [each for each in args.overrides if not each.startswith("checkpoint.resume=")]
    return shlex.join(["oppo", kind, str(args.config), *overrides, "--resume"])


def _launch(kind: str, config: TrainConfig | SupervisedConfig, restarts: int, agent: str) -> int:
    """Launch with restarts by `agent`, which is ignored if another launcher started the ranks."""
    from oppo_megatron.cli.launch import external_ranks, launch
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.layout.placements import world_size

    if restarts > 0 and isinstance(config, TrainConfig) and external_ranks(os.environ) is None:
        from oppo_megatron.cli.ft_launcher import launch_restarting, restarts_by_ft_launcher

        if restarts_by_ft_launcher(agent, restarts):
            return launch_restarting(config, restarts)
    again = restarts or world_size(config) > 1 or _goes_back(config)
    return launch_again(kind, config, restarts) if again else launch(kind, config, world_size(config))


def launch_again(kind: str, config: TrainConfig | SupervisedConfig, restarts: int) -> int:
    """Launch the ranks; if one is killed or the run stalls, launch again from the last checkpoint, up to `restarts` times.

    The same follows a guard's rollback or an out-of-memory error; those are not counted as restarts and have their own limit.
    """
    from oppo_megatron.cli.launch import RankKilled, RankStalled, launch
    from oppo_megatron.errors import EXIT_AGAIN, ConfigError
    from oppo_megatron.layout.placements import world_size

    if restarts < 0:
        raise ConfigError(f"--max-restarts is {restarts}; it must be 0 or more")
    left = restarts
    while True:
        try:
            code = launch(kind, config, world_size(config), in_process=False)
        except (RankKilled, RankStalled) as error:
            if not left:
                raise
            told = f"{error}; starting again, {left} of {restarts} restarts left"
            left -= 1
        else:
            if code != EXIT_AGAIN:
                return code
            told = "starting again from the last checkpoint, as a rank asked"
        print(f"oppo {kind}: {told}", file=sys.stderr, flush=True)
        config = resuming(config)


def _goes_back(config: TrainConfig | SupervisedConfig) -> bool:
    """True if a guard of the run may roll back to a checkpoint; its ranks then need their own processes."""
    from oppo_megatron.config.run import TrainConfig

    return isinstance(config, TrainConfig) and config.guards.action == "rollback"


def resuming(config: TrainConfig | SupervisedConfig) -> TrainConfig | SupervisedConfig:
    """Return the same run, resumed if it has a checkpoint."""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": True})})


def load_settings(
    kind: str, path: Path, overrides: Sequence[str], *, inputs: bool = True, models: bool = True
) -> TrainSettings | SupervisedConfig:
    """Return the checked configuration of one of `KINDS`, not yet placed: `placement.mode` may be auto.

    `inputs`, `models`: require training's tokenizer and rows, and its models, to exist.  Raises ConfigError with all
    problems.
    """
    from oppo_megatron.config.describe import SUPERVISED
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.data.length_trace import trace_problems
    from oppo_megatron.preflight.validate import supervised_problems, train_problems

    require_kind(kind, path, overrides)
    if kind == "train":
        return load_config(
            TrainSettings,
            path,
            overrides,
            check=lambda config: [
                *train_problems(config, inputs=inputs, models=models),
                *trace_problems(config.debug.lengths, config.rollout.max_response_tokens),
            ],
        )
    return load_config(SUPERVISED[kind], path, overrides, check=supervised_problems)


def load_checked(
    kind: str, path: Path, overrides: Sequence[str], *, inputs: bool = True
) -> TrainConfig | SupervisedConfig:
    """Call `load_settings` for commands that need the placement.  Raises ConfigError for mode auto, too."""
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.errors import ConfigError

    settings = load_settings(kind, path, overrides, inputs=inputs)
    config = settings.settled() if isinstance(settings, TrainSettings) else settings
    if config is None:
        raise ConfigError(
            f"{path}: placement.mode is auto, which `oppo train` settles before a run, but this command does not; measure "
            "with `oppo plan measure CONFIG` and write the placement that it prints, or add placement.mode=single"
        )
    return config


def load_train(path: Path, overrides: Sequence[str], *, inputs: bool = True) -> TrainConfig:
    """Call `load_checked` for commands that support only PPO training."""
    from oppo_megatron.config.run import TrainConfig

    config = load_checked("train", path, overrides, inputs=inputs)
    assert isinstance(config, TrainConfig)
    return config


def placed(settings: TrainSettings | SupervisedConfig, *, measure: bool) -> TrainConfig | SupervisedConfig | None:
    """Return the configuration with its placement; None if it is unknown and `measure` is false."""
    from oppo_megatron.cli.measure import settle
    from oppo_megatron.config.run import TrainSettings

    return settle(settings, measure=measure) if isinstance(settings, TrainSettings) else settings


def unplaced(settings: TrainSettings | SupervisedConfig) -> list[str]:
    """Return the lines to print if `placed` returned None: the planned measurements."""
    from oppo_megatron.cli.measure import describe_options
    from oppo_megatron.config.run import TrainSettings

    assert isinstance(settings, TrainSettings), "the placement of others is written down"
    return describe_options(settings)
