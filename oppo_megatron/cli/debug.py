"""`--debug`, which every command takes: before or behind the name of its part where it has parts (`oppo launch slurm`)."""

from __future__ import annotations

import argparse


def add_debug_argument(parser: argparse.ArgumentParser) -> None:
    """Where it is not given nothing is set, so that the parser of a part leaves what was given before its name."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
