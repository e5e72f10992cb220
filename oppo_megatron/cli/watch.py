"""`oppo watch`: follow a run started by any process in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="seconds between two reads (default: 2)")
    parser.add_argument("--once", action="store_true", help="show the figures once; the default without a terminal")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from oppo_megatron.errors import ConfigError
    from oppo_megatron.report.watch import watch

    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval is {args.interval}; it must be between 0.1 and 3600 seconds")
    watch(args.run_dir, args.interval, Console(highlight=False), once=args.once)
    return 0
