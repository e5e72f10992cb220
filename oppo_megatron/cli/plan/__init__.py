"""`oppo plan`: place a run or a dataflow on a described cluster, simulate a run, draw a schedule, measure placements here."""

from __future__ import annotations

import argparse

from oppo_megatron.cli.parser import add_modes
from oppo_megatron.cli.plan import flow, measure, schedule, search, simulate

MODES = {"search": search, "flow": flow, "simulate": simulate, "schedule": schedule, "measure": measure}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "docs/planner.md explains search, flow, simulate and measure, docs/schedule.md schedule."
    add_modes(parser, MODES)


def run(args: argparse.Namespace) -> int:
    return int(args.run_mode(args))
