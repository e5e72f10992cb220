"""`oppo train` (PPO), `oppo sft`, `oppo rm`, `oppo dpo`: show the plan, or launch the ranks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from datetime import datetime

from oppo_megatron.cli.launch import RankKilled, RankStalled, check_world_size, launch, speaks_for_all
from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.measure import describe_options, resolve_placement
from oppo_megatron.cli.parser import add_config_arguments, at_least
from oppo_megatron.cli.ready import ended_here, rank_table, require_ready, require_task_data
from oppo_megatron.cli.signals import ending_by_signal
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.errors import EXIT_AGAIN, EXIT_REQUEUE
from oppo_megatron.layout.placements import world_size
from oppo_megatron.rundir.directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the last whole checkpoint of run_dir, if it has one")
    parser.add_argument(
        "--max-restarts", type=at_least(0), default=0, metavar="N",
        help="if a rank is killed or the run stalls, continue from the last whole checkpoint, up to N times",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the ranks, then stop")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError before anything expensive starts."""
    kind = args.command
    settings = load_settings(kind, args.config, args.overrides)
    if args.resume:
        settings = settings.resumed()
    if args.dry_run:
        config = resolve_placement(settings, measure=False)
        if config is None:
            print(config_yaml(settings), *describe_options(settings), sep="\n")
            return 0
        check_world_size(world_size(config))
        print(config_yaml(config), *rank_table(config), sep="\n")
        return 0
    directory = RunDirectory(settings.run_dir)
    before = directory.last_saved()
    code = start(kind, settings, args.max_restarts)
    if code == EXIT_REQUEUE and speaks_for_all(os.environ):
        saved = "saved" if directory.last_saved() != before else "not saved in time"
        again = shlex.join(["oppo", kind, str(args.config), *args.overrides, "--resume"])
        print(f"oppo {kind}: {saved}; continue with: {again}", file=sys.stderr, flush=True)
    return code


def start(kind: str, settings: TrainSettings | SupervisedConfig, restarts: int = 0) -> int:
    """Check this machine, place the roles and launch the ranks; return the exit code.

    Launches again up to `restarts` times after a kill or stall, and always after a guard's rollback.
    """
    require_ready(settings, resolve_placement(settings, measure=False))
    require_task_data(settings)
    config = resolve_placement(settings, measure=True)
    assert config is not None, "a measured placement is known"
    size = world_size(config)
    check_world_size(size)
    directory = RunDirectory(config.run_dir)
    if config.resume and ended_here(config, directory):
        print(f"oppo {kind}: {directory.path} holds this very run, and it has ended: nothing to do", file=sys.stderr)
        return 0
    tokenizer = config.tokenizer.dated(directory.first_date(datetime.now()))  # so that all attempts render the same prompts
    config = config.model_copy(update={"tokenizer": tokenizer})
    if config.logging.console != "off" and speaks_for_all(os.environ):
        ranks = f"{size} rank{'s' if size > 1 else ''}"
        print(f"oppo {kind}: starting {ranks}, run directory {config.run_dir}", file=sys.stderr, flush=True)
    # Ranks that may roll back to a checkpoint need their own processes.
    again = restarts or size > 1 or (isinstance(config, TrainConfig) and config.guards.action == "rollback")
    if not again:
        return launch(kind, config, size)
    try:
        with ending_by_signal():  # until the ranks run, and between two starts; else the launcher's relay hears them
            return _launch_again(kind, config, size, restarts)
    except SystemExit:
        return EXIT_REQUEUE


def _launch_again(kind: str, config: TrainConfig | SupervisedConfig, size: int, restarts: int) -> int:
    left = restarts
    while True:
        try:
            code = launch(kind, config, size, in_process=False)
        except (RankKilled, RankStalled) as error:
            if not left:
                raise
            reason = f"{error}; starting again, {left} of {restarts} restarts left"
            left -= 1
        else:
            if code != EXIT_AGAIN:
                return code
            reason = "starting again from the last checkpoint, as a rank asked"
        print(f"oppo {kind}: {reason}", file=sys.stderr, flush=True)
        config = config.resumed()
