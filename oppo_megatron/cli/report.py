"""`oppo report`: a page and pictures of one or more runs; with --watch, one run's figures in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from oppo_megatron.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; several are compared")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for index.html and the PNGs (default: report/ in the first RUN)"
    )
    parser.add_argument(
        "--step", type=int, action="append", default=[], metavar="N",
        help="draw the timeline of step N in place of the step of median length; repeatable",
    )  # fmt: skip
    parser.add_argument("--no-png", action="store_true", help="write the page only")
    parser.add_argument("--watch", action="store_true", help="follow RUN's main figures in the terminal until it ends")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS",
        help="--watch: seconds between two reads; 0: show the figures once, as without a terminal (default: 2)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.watch:
        return _watch(args)
    from oppo_megatron.report.sections import write_report

    def progress(line: str) -> None:
        print(f"oppo report: {line}", file=sys.stderr, flush=True)

    out: Path = args.out or args.runs[0] / "report"
    written = write_report(args.runs, out, args.step, pictures=not args.no_png, progress=progress)
    pictures = f" and {len(written) - 1} pictures" if len(written) > 1 else ""
    print(f"{written[0]}{pictures}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    from oppo_megatron.report.watch import watch

    if args.interval and not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval is {args.interval:g}; it must be between 0.1 and 3600 seconds, or 0 to read once")
    if len(args.runs) > 1:
        raise ConfigError(f"--watch follows one run, but {len(args.runs)} are given; name one")
    if args.out is not None or args.step or args.no_png:
        raise ConfigError("--watch writes nothing; drop --out, --step and --no-png, or --watch")
    watch(args.runs[0], args.interval, Console(highlight=False))
    return 0
