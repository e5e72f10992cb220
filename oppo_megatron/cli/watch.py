"""`oppo watch`: the figures of a run in the terminal while it goes on, also of another process."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="show it once, and end; so where there is no terminal")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from oppo_megatron.errors import ConfigError
    from oppo_megatron.report.watch import watch

    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval is {args.interval}; it must lie between 0.1 and 3600 seconds")
    watch(args.run_dir, args.interval, Console(highlight=False), once=args.once)
    return 0
