"""`oppo bench real`: the calls and steps that ReaL has published, beside what the planner's laws say of them."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "ReaL's published plans, predicted: how near the cost laws come to 128 GPUs"
ABOUT = """Plays ReaL's four published plans (MLSys 2025, tables 2 to 6) from the seconds of their calls, and predicts these from
the cost laws with five constants. They are fitted to all plans, and to all but the one that is predicted: both errors are
shown. Needs no GPU and no file, and takes a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures there, too")
    parser.set_defaults(measure=_real)


def _real(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.sim.published import report as published

    report = published.real_report()
    print("steps played from the published seconds of their calls (Algorithm 1):")
    print(format_table(published.PLAYED_COLUMNS, report.played))
    print("\nby law alone, nothing fitted, nothing launched, nothing between calls:")
    print(format_table(published.UNFITTED_COLUMNS, report.unfitted))
    print(f"the order of the plans is {'right' if report.order_is_right else 'wrong'}")
    print("\nfive constants, fitted to calls; left out: without the plan's own:")
    print(format_table(published.CONSTANT_COLUMNS, report.constants))
    print()
    print(format_table(published.PREDICTED_COLUMNS, [*report.calls, *report.steps, *report.speedups]))
    errors = report.errors
    print(
        f"errors of the {len(report.calls) - len(report.played)} published calls: mean {errors['left_out_mean']:.1f} %, worst "
        f"{errors['left_out_worst']:.1f} % with the plan left out ({errors['fitted_mean']:.1f} and "
        f"{errors['fitted_worst']:.1f} % fitted)"
    )
    if args.out is not None:
        write_json(args.out, report.tree())
    return 0
