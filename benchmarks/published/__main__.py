"""Published measurements and the planner's cost laws: ReaL's plans on 128 GPUs, speeds of serving and training.

    python -m benchmarks.published --out runs/bench/published

Plays ReaL's four plans (MLSys 2025, tables 2 to 6) from the seconds of their calls, and predicts these from the laws with five
constants, fitted to all plans and to all but the predicted one.  Then lists the laws' constants and published speeds to which
nothing was fitted.  Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.common import add_out, run_script, write_figures
from benchmarks.published.calls import Constants
from benchmarks.published.points import compared_with_laws
from benchmarks.published.prediction import (
    NO_GRAPHS,
    Costs,
    Predicted,
    fit,
    fit_without,
    order_is_right,
    predicted_calls,
    predicted_speedups,
    predicted_steps,
    steady_step_s,
    step_s,
    tie_orders,
    unfitted_steps,
)
from benchmarks.published.tables import PLANS, PublishedPlan
from oppo_megatron.report.comparison import format_table
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Cluster

PLAYED_COLUMNS = {
    "plan": "plan", "sum of calls": "sum_s", "played": "played_s", "further steps": "further_s",
    "other tie orders": "others_s", "published": "wall_s",
    "error %": "error_percent", "no graphs: played": "no_graph_played_s", "published ": "no_graph_wall_s",
    "error % ": "no_graph_error_percent",
}  # fmt: skip
CONSTANT_COLUMNS = {
    "fitted without": "plan", "kernels x": "kernels", "GB/s a node": "node_gb_per_s", "us a layer launched": "launch_us",
    "s a call": "call_s", "us a layer replayed": "replay_us",
}  # fmt: skip
PREDICTED_COLUMNS = {
    "plan": "plan", "what": "what", "published": "published", "fitted": "fitted", "error %": "fitted_error_percent",
    "left out": "left_out", "error % ": "left_out_error_percent",
}  # fmt: skip
UNFITTED_COLUMNS = {"plan": "plan", "published": "wall_s", "by law alone": "unfitted_s"}


@dataclass(frozen=True)
class Report:
    """Rows of the tables above; `errors` of the calls in percent: mean and worst, fitted and left out."""

    played: Sequence[Mapping[str, Any]]
    unfitted: Sequence[Mapping[str, Any]]
    order_is_right: bool
    constants: Sequence[Mapping[str, Any]]
    calls: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    speedups: Sequence[Mapping[str, Any]]
    errors: Mapping[str, float]


def real_report() -> Report:
    calls, unfitted = list(predicted_calls()), unfitted_steps()
    return Report(
        played=[_played(plan) for plan in PLANS],
        unfitted=[{"plan": p.name, "wall_s": p.wall_s, "unfitted_s": unfitted[p.name]} for p in PLANS],
        order_is_right=order_is_right(unfitted),
        constants=[_constants("none", fit(PLANS)), *(_constants(plan.name, fit_without(plan)) for plan in PLANS)],
        calls=[_row(call) for call in calls],
        steps=[_row(step) for step in [*predicted_steps(), *predicted_steps(graphs=False)]],
        speedups=[_row(speedup) for speedup in predicted_speedups()],
        errors=errors_of([call for call in calls if call.what != NO_GRAPHS]),
    )


def errors_of(rows: Sequence[Predicted]) -> dict[str, float]:
    """Return mean and worst errors in percent."""
    fitted, left_out = [100 * abs(row.fitted_error) for row in rows], [100 * abs(row.left_out_error) for row in rows]
    return {
        "fitted_mean": fmean(fitted),
        "fitted_worst": max(fitted),
        "left_out_mean": fmean(left_out),
        "left_out_worst": max(left_out),
    }


def _played(plan: PublishedPlan) -> dict[str, Any]:
    """Play the published seconds of calls by Algorithm 1."""
    printed = Costs.printed(plan)
    played, without = step_s(plan, printed), step_s(plan, Costs.printed(plan, graphs=False))
    return {
        "plan": plan.name,
        "sum_s": sum(call.seconds for call in plan.calls),
        "played_s": played,
        "further_s": steady_step_s(plan, printed),
        "others_s": sorted({seconds for seconds in tie_orders(plan, printed).values() if seconds != played}),
        "wall_s": plan.wall_s,
        "error_percent": 100 * (played / plan.wall_s - 1),
        "no_graph_played_s": without,
        "no_graph_wall_s": plan.no_graph_wall_s,
        "no_graph_error_percent": 100 * (without / plan.no_graph_wall_s - 1),
    }


def _constants(plan: str, constants: Constants) -> dict[str, Any]:
    return {
        "plan": plan,
        "kernels": constants.kernels,
        "node_gb_per_s": 1 / constants.node_s_per_gb if constants.node_s_per_gb else None,
        "launch_us": 1e6 * constants.launch_s,
        "call_s": constants.call_s,
        "replay_us": 1e6 * constants.replay_s,
    }


def _row(predicted: Predicted) -> dict[str, Any]:
    return {
        **vars(predicted),
        "fitted_error_percent": 100 * predicted.fitted_error,
        "left_out_error_percent": 100 * predicted.left_out_error,
    }


def print_constants(name: str) -> None:
    """Print the laws' constants of a GPU with their sources."""
    gpu = GPUS[name]
    print(f"\n{name}: {gpu.flops / 1e12:g} TFLOP/s, {gpu.bytes_per_s / 1e9:g} GB/s, {gpu.memory_bytes / 1e9:g} GB")
    rows = [{"name": key, "value": value} for key, value in vars(gpu.efficiencies).items()]
    print(format_table({"constant": "name", "value": "value"}, rows))
    print(*(f"{constant}: {source}" for constant, source in Cluster(1, 8, gpu, INSIDE[name]).sources()), sep="\n")


def measure(args: argparse.Namespace) -> int:
    report = real_report()
    print("steps played from the published seconds of their calls (Algorithm 1):")
    print(format_table(PLAYED_COLUMNS, report.played))
    print("\nby law alone, nothing fitted, nothing launched, nothing between calls:")
    print(format_table(UNFITTED_COLUMNS, report.unfitted))
    print(f"the order of the plans is {'right' if report.order_is_right else 'wrong'}")
    print("\nfive constants, fitted to calls; left out: without the plan's own:")
    print(format_table(CONSTANT_COLUMNS, report.constants))
    print()
    print(format_table(PREDICTED_COLUMNS, [*report.calls, *report.steps, *report.speedups]))
    errors = report.errors
    print(
        f"errors of the {len(report.calls) - len(report.played)} published calls: mean {errors['left_out_mean']:.1f} %, worst "
        f"{errors['left_out_worst']:.1f} % with the plan left out ({errors['fitted_mean']:.1f} and "
        f"{errors['fitted_worst']:.1f} % fitted)"
    )
    for name in GPUS:
        print_constants(name)
    print("\npublished speeds, to which nothing was fitted:")
    points = list(compared_with_laws())
    columns = {"gpu": "gpu", "what": "what", "measured": "measured", "by law": "law", "measured / law": "ratio"}
    print(format_table(columns, points))
    write_figures(args.out, "published", {**vars(report), "points": points})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.published", __doc__, lambda parser: add_out(parser, "published"), measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
