"""`oppo bench scaling`: how a step's cost grows with ranks, models, responses and batches."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.bench.common import (
    add_limit_argument,
    add_resume_argument,
    add_run_arguments,
    counts,
    limit_cores,
    load_base,
    new_suite,
    numbers,
)

HELP = "seconds a step against ranks, model size, response limit and batch"
AXES = ("ranks", "model", "limit", "batch")
ABOUT = """Moves one axis at a time away from the configuration, in plain PPO (sequential) and with both overlaps (full), and
prints the seconds of a step with the power of the axis that they grow by.

axes: ranks (one thread each, the same work: all but one rank replicas of the actor where disaggregated), model (width and
depth of all roles, which must be initialised at random), limit (longest response; log-normal forced lengths follow), batch
(rollouts a step; delta follows)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "scaling")
    add_resume_argument(parser)
    parser.add_argument("--axis", choices=(*AXES, "all"), default="all", help="default: all, one after the other")
    parser.add_argument(
        "--ranks", type=counts, metavar="N,N", help="of the axis ranks; default: powers of two up to the cores"
    )
    parser.add_argument(
        "--factors",
        type=numbers,
        default=[0.5, 1.0, 2.0],
        metavar="F,F",
        help="factors of the configured values on the other axes; default 0.5,1,2",
    )
    add_limit_argument(parser)
    parser.set_defaults(measure=_scaling)


def _scaling(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.limit import limit_lines
    from oppo_megatron.bench.scaling import COLUMNS, bench_scaling, make_axes, remarks
    from oppo_megatron.cores import usable_cores

    cores = usable_cores()
    ranks = args.ranks or [2**power for power in range(cores.bit_length())]
    config = load_base(args)
    axes = make_axes(config, AXES if args.axis == "all" else [args.axis], sorted(set(ranks)), sorted(set(args.factors)))
    result = bench_scaling(new_suite(args), config, axes, limit_cores(args))
    print(format_table(COLUMNS, result["results"]))
    print(
        *limit_lines(result),
        *remarks(result),
        f"figures: {args.out / 'scaling.json'}, {args.out / 'scaling.png'}",
        sep="\n",
    )
    return 0
