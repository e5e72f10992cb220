"""`oppo sft`: supervised fine-tuning.  `oppo rm`: a reward model from pairs.  `oppo prm`: a process reward model from steps.
`oppo dpo`, `oppo kto`: from preferences."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.run import add_run_arguments, run_kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_kind(args.command, args)
