"""`oppo bench fork`: what is saved where the responses to a prompt fork one cache of it."""

from __future__ import annotations

import argparse
from typing import Any

from oppo_megatron.cli.bench.common import add_resume_argument, add_run_arguments, load_base, new_suite

HELP = "seconds and prefilled tokens with a prompt's cache forked, and without, by the prompt's length"
ABOUT = """Runs a configuration of groups with prompts of several lengths, each with debug.fork on and off: one prefill of a
prompt for all its responses, or one for each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "fork", prompts=[64, 256, 1024])
    add_resume_argument(parser)
    parser.set_defaults(measure=_fork)


def _fork(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.fork import COLUMNS, bench_fork
    from oppo_megatron.bench.suite import work_lines

    configs = {tokens: load_base(_of_length(args, tokens), inputs=f"inputs-{tokens}") for tokens in args.prompt_tokens}
    result = bench_fork(new_suite(args), configs)
    print(format_table(COLUMNS, result["results"]))
    print(*work_lines(result), f"figures: {args.out / 'fork.json'}, {args.out / 'fork.png'}", sep="\n")
    return 0


def _of_length(args: argparse.Namespace, tokens: int) -> argparse.Namespace:
    own: dict[str, Any] = vars(args) | {"prompt_tokens": tokens}
    return argparse.Namespace(**own)
