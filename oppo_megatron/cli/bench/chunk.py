"""`oppo bench chunk`: chunk sizes against seconds a step, and the tuner's choice."""

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
)

HELP = "chunk sizes, fixed and adaptive, against seconds a step"
ABOUT = """Runs one configuration with several fixed chunk sizes and with the adaptive tuner (overlap.chunk as configured), and
says what the tuner settled on and how far its settled steps are from the best fixed size (the paper's Figure 7b)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "chunk")
    add_resume_argument(parser)
    parser.add_argument(
        "--sizes",
        type=counts,
        default=[8, 16, 32, 64, 128],
        metavar="N,N",
        help="fixed sizes, in decode steps, those beyond the response limit left out; default 8,16,32,64,128",
    )
    parser.add_argument("--no-adaptive", action="store_true", help="the fixed sizes only")
    add_limit_argument(parser)
    parser.set_defaults(measure=_chunk)


def _chunk(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.chunk import COLUMNS, bench_chunk, remarks
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.limit import limit_lines
    from oppo_megatron.bench.suite import work_lines

    result = bench_chunk(new_suite(args), load_base(args), args.sizes, not args.no_adaptive, limit_cores(args))
    print(format_table(COLUMNS, result["results"]))
    print(
        *limit_lines(result),
        *work_lines(result),
        *remarks(result),
        f"figures: {args.out / 'chunk.json'}, {args.out / 'chunk.png'}",
        sep="\n",
    )
    return 0
