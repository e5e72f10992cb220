"""`oppo report`: one page, and pictures, of one or more runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


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


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.report.build import write_report

    def progress(line: str) -> None:
        print(f"oppo report: {line}", file=sys.stderr, flush=True)

    out: Path = args.out or args.runs[0] / "report"
    written = write_report(args.runs, out, args.step, pictures=not args.no_png, progress=progress)
    pictures = f" and {len(written) - 1} pictures" if len(written) > 1 else ""
    print(f"{written[0]}{pictures}")
    return 0
