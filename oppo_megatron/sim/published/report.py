"""ReaL's published figures beside what Algorithm 1 and the laws say, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from oppo_megatron.sim.published.calls import Constants
from oppo_megatron.sim.published.prediction import (
    NO_GRAPHS,
    Predicted,
    fit,
    fit_without,
    order_is_right,
    predicted_calls,
    predicted_speedups,
    predicted_steps,
    unfitted_steps,
)
from oppo_megatron.sim.published.steps import Costs, steady_step_s, step_s, tie_orders
from oppo_megatron.sim.published.tables import PLANS, PublishedPlan

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

    def tree(self) -> dict[str, Any]:
        return dict(vars(self))


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
    """In percent."""
    fitted, left_out = [100 * abs(row.fitted_error) for row in rows], [100 * abs(row.left_out_error) for row in rows]
    return {
        "fitted_mean": fmean(fitted),
        "fitted_worst": max(fitted),
        "left_out_mean": fmean(left_out),
        "left_out_worst": max(left_out),
    }


def _played(plan: PublishedPlan) -> dict[str, Any]:
    """Algorithm 1 over the published seconds of calls."""
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
