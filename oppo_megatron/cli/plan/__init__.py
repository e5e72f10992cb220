"""`oppo plan`: search placements on a described cluster, simulate a run, draw a round's schedule, measure placements here."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.parser import add_debug_argument
from oppo_megatron.cli.plan import measure, schedule, search, simulate

MODES = {"search": search, "simulate": simulate, "schedule": schedule, "measure": measure}
"""Each module has HELP (one line), `add_arguments` and `run`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/planner.md explains search, simulate and measure, docs/schedule.md schedule."
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for name, module in MODES.items():
        mode = modes.add_parser(name, help=module.HELP, description=f"{module.HELP}.")
        add_debug_argument(mode)
        module.add_arguments(mode)
        mode.set_defaults(run_mode=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.run_mode(args))
