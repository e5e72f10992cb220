"""`oppo bench weave`: colocated roles in pipeline stages, their rounds woven or not."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.bench.common import (
    add_resume_argument,
    add_run_arguments,
    chosen,
    load_base,
    names,
    new_suite,
)

HELP = "colocated roles in pipeline stages: sequential, unwoven and woven rounds"
ABOUT = """Runs a configuration whose roles share pipeline stages, every action traced, and says how long the rounds of a step
are and how much of them the ranks stand idle (the bubble).

modes: sequential (the finished batch is scored), unwoven (each chunk is scored before the next is decoded), woven
(scoring fills the gaps of the decode pipeline)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "weave")
    add_resume_argument(parser)
    parser.add_argument("--modes", type=names, metavar="A,B", help="default: all")
    parser.set_defaults(measure=_weave)


def _weave(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.suite import work_lines
    from oppo_megatron.bench.weave import COLUMNS, WEAVES, bench_weave

    modes = chosen("--modes", args.modes, list(WEAVES))
    result = bench_weave(new_suite(args), load_base(args), modes)
    print(format_table(COLUMNS, result["results"]))
    print(*work_lines(result), sep="\n")
    print(f"figures: {args.out / 'weave.json'}, {args.out / 'weave.png'}")
    return 0
