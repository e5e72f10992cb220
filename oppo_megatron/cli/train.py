"""`oppo train`: PPO."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.run import add_run_arguments, run_kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--agent",
        choices=("auto", "nvrx", "torch"),
        default="auto",
        help="who starts again: nvidia-resiliency-ext's ft_launcher, or torch's elastic agent and a loop of ours; auto: the "
        "former where it is installed",
    )


def run(args: argparse.Namespace) -> int:
    return run_kind("train", args)
