"""`oppo report`: one page, and pictures, of one or more runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directory; several are shown side by side"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where index.html and the PNGs go (default: report/ in the first RUN)"
    )
    parser.add_argument(
        "--step",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="keep the timeline of step N whole, and draw it in timeline.png; may be repeated",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page only")


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.report.build import write_report

    out: Path = args.out or args.runs[0] / "report"
    def tell(line: str) -> None:
        print(f"oppo report: {line}", file=sys.stderr, flush=True)

    written = write_report(args.runs, out, args.step, pictures=not args.no_png, tell=tell)
    pictures = f" and {len(written) - 1} pictures" if len(written) > 1 else ""
    print(f"{written[0]}{pictures}")
    return 0
