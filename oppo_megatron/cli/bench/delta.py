"""`oppo bench delta`: fixed deltas and the rules that move it."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.bench.common import (
    add_limit_argument,
    add_resume_argument,
    add_run_arguments,
    chosen,
    limit_cores,
    load_base,
    names,
    new_suite,
    whole_numbers,
)

HELP = "fixed deltas and every rule: seconds a step, and what carrying costs"
ABOUT = """Runs one configuration with several fixed deltas (rollouts decoded beyond the batch) and with each rule that moves
delta: seconds a step beside carried rollouts, tokens of an older policy, the gap between trained and submitted lengths, and
the effective sample size (the paper's Figure 7a)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "delta")
    add_resume_argument(parser)
    parser.add_argument(
        "--fixed", type=whole_numbers, default=[0, 4, 8], metavar="N,N", help="fixed deltas; default 0,4,8"
    )
    parser.add_argument(
        "--rules", type=names, metavar="A,B", help="default: eq4, algorithm1 and what else is registered"
    )
    add_limit_argument(parser)
    parser.set_defaults(measure=_delta)


def _delta(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.delta import COLUMNS, COMPARED_RULES, MOVING_RULES, bench_delta, remarks
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.limit import limit_lines
    from oppo_megatron.bench.suite import work_lines

    rules = chosen("--rules", args.rules or COMPARED_RULES, MOVING_RULES)
    config = load_base(args)
    result = bench_delta(new_suite(args), config, args.fixed, rules, limit_cores(args))
    print(format_table(COLUMNS, result["results"]))
    print(
        *limit_lines(result),
        *work_lines(result),
        *remarks(config, result),
        f"figures: {args.out / 'delta.json'}, {args.out / 'delta.png'}",
        sep="\n",
    )
    return 0
