"""`oppo bench overlap`: the time that each overlap saves, against plain PPO in the same placement and in the best one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oppo_megatron.cli.bench.common import (
    add_limit_argument,
    add_resume_argument,
    add_run_arguments,
    chosen,
    count,
    load_base,
    names,
    new_suite,
)

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig

HELP = "plain PPO and every overlap, in one placement or several"
ABOUT = """Runs one configuration in every mode of the loop, with the same prompts and seed, and compares them.

modes: sequential (plain PPO), intra (scoring streamed beside decoding), inter (B + delta rollouts decoded, the late
ones carried over), full (both), full+backfill (freed slots refilled at once), full+critic (the critic updated beside
the next step's decoding), intra+critic, full+both.

placements: pair (as the configuration says), single (one process with all cores as threads), replicas (all roles on
every core: data-parallel processes of one thread).  pair has to beat sequential in single and replicas.

rewards: with --rewards every mode runs under each kind of reward: a rule (verifier), a reward model, a process reward
model (process)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "overlap")
    add_resume_argument(parser)
    parser.add_argument("--modes", type=names, metavar="A,B", help="default: all")
    parser.add_argument(
        "--placements", type=names, default=["pair"], metavar="A,B", help="pair, single, replicas, or all; default pair"
    )
    parser.add_argument(
        "--cores", type=count, metavar="N", help="cores of single and replicas; default: all that may be used"
    )
    parser.add_argument(
        "--rewards",
        type=names,
        metavar="A,B",
        help="kinds of reward in place of the configuration's: verifier, model, process, or all",
    )
    add_limit_argument(parser)
    parser.set_defaults(measure=_overlap)


def _overlap(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.limit import limit_lines
    from oppo_megatron.bench.overlap import (
        COLUMNS,
        PLACEMENTS,
        RANK_COLUMNS,
        bench_overlap,
        known_modes,
        rank_rows,
        remarks,
    )
    from oppo_megatron.bench.suite import work_lines
    from oppo_megatron.config.modes import MODES
    from oppo_megatron.cores import usable_cores
    from oppo_megatron.errors import ConfigError

    asked = chosen("--modes", args.modes, list(MODES))
    placements = chosen("--placements", args.placements, PLACEMENTS)
    config = load_base(args)
    modes = [mode for mode in asked if mode in known_modes(config)]
    if args.modes and "all" not in args.modes and modes != asked:
        hiding = ", ".join(mode for mode in asked if mode not in modes)
        raise ConfigError(
            f"--modes names {hiding}, which would hide the critic's update, but algorithm.preset {config.algorithm.preset} has "
            f"no critic; choose from {', '.join(known_modes(config))}"
        )
    cores = args.cores or usable_cores()
    if args.rewards is not None:
        return _rewards(args, config, modes, placements, cores)
    result = bench_overlap(new_suite(args), config, modes, placements, cores, limit=args.limit)
    print(format_table(COLUMNS, result["results"]))
    print("\nwhat each rank does, in percent of the time after the first step")
    print(format_table(RANK_COLUMNS, rank_rows(result)))
    print(*limit_lines(result), "", *work_lines(result), *remarks(result, args.out), sep="\n")
    return 0


def _rewards(
    args: argparse.Namespace, config: TrainConfig, modes: Sequence[str], placements: Sequence[str], cores: int
) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.rewards import COLUMNS, REWARDS, bench_rewards
    from oppo_megatron.bench.suite import work_lines
    from oppo_megatron.errors import ConfigError

    if args.limit:
        raise ConfigError("--limit is of one kind of reward; leave out --limit or --rewards")
    rewards = chosen("--rewards", args.rewards, REWARDS)
    result = bench_rewards(new_suite(args), config, rewards, modes, placements, cores)
    print(format_table(COLUMNS, result["results"]))
    pictures = ", ".join(str(args.out / f"overlap-{reward}.png") for reward in rewards)
    print(*work_lines(result), f"figures: {args.out / 'overlap.json'}, {pictures}", sep="\n")
    return 0
