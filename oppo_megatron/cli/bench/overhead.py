"""`oppo bench overhead`: the cost of the loop itself, besides the models."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.bench.common import add_run_arguments, count, load_base, new_suite

HELP = "seconds of a step that scheduler, buffer, planner, stream and controllers take"
ABOUT = """Drives the pure half of the loop without models at a large batch and times its parts; then runs tiny models at
that batch, and the configuration as it is, and says what share of a step planning and bookkeeping are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "overhead")
    parser.add_argument("--batch", type=count, default=512, metavar="N", help="rollouts a step; default 512")
    parser.add_argument("--profile", action="store_true", help="print where the dry run spends its time (cProfile)")
    parser.set_defaults(measure=_overhead)


def _overhead(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.overhead import COLUMNS, bench_overhead, remarks

    result = bench_overhead(new_suite(args), load_base(args), args.batch, profile=args.profile)
    print(format_table(COLUMNS, result["results"]))
    print(*remarks(result), sep="\n")
    if args.profile:
        print(result["profile"])
    print(f"figures: {args.out / 'overhead.json'}, {args.out / 'overhead.png'}")
    return 0
