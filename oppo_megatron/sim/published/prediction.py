"""ReaL's published seconds predicted: five constants fitted to other plans than the one that is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from oppo_megatron.sim.clusters.links import GB
from oppo_megatron.sim.laws.nonnegative import relative_fit
from oppo_megatron.sim.published.calls import UNFITTED, Constants, Work, features_of, work_of
from oppo_megatron.sim.published.steps import Costs, step_s
from oppo_megatron.sim.published.tables import GENERATION, PAIRS, PLANS, PublishedPlan, plan_named

NO_GRAPHS = "ActorGen, no graphs"


@dataclass(frozen=True)
class Row:
    """A published call and its work."""

    plan: str
    call: str
    seconds: float
    work: Work


@dataclass(frozen=True)
class Predicted:
    """A figure beside its predictions: with constants fitted to all plans, and to all but its own."""

    plan: str
    what: str
    published: float
    fitted: float
    left_out: float

    @property
    def fitted_error(self) -> float:
        return self.fitted / self.published - 1

    @property
    def left_out_error(self) -> float:
        return self.left_out / self.published - 1


@cache
def rows_of(plan: PublishedPlan) -> tuple[Row, ...]:
    """The six calls of a plan, and generation without CUDA graphs."""
    rows = [Row(plan.name, call.name, call.seconds, work_of(call, plan.batch)) for call in plan.calls]
    captured_not = work_of(plan.call(GENERATION), plan.batch, graphs=False)
    return (*rows, Row(plan.name, NO_GRAPHS, plan.no_graph_s, captured_not))


def fit(plans: Iterable[PublishedPlan]) -> Constants:
    """The constants of the least squared relative error over the plans' rows."""
    rows = [row for plan in plans for row in rows_of(plan)]
    features = np.array([features_of(row.work) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    decode = np.array([row.work.decode_s for row in rows])
    return Constants(*map(float, relative_fit(features, seconds, decode)))


def fit_without(plan: PublishedPlan) -> Constants:
    return fit(other for other in PLANS if other is not plan)


def costs_of(plan: PublishedPlan, constants: Constants, *, graphs: bool = True) -> Costs:
    """Every figure of a step by law: its calls, the moves of weights, and what passes between calls."""
    seconds = {row.call: constants.seconds(row.work) for row in rows_of(plan)}
    without = seconds.pop(NO_GRAPHS)
    calls = seconds if graphs else {**seconds, GENERATION: without}
    return Costs(calls, constants.node_s_per_gb / GB, constants.call_s)


def predicted_calls() -> Iterator[Predicted]:
    """All rows of all plans."""
    everything = fit(PLANS)
    for plan in PLANS:
        others = fit_without(plan)
        for row in rows_of(plan):
            yield Predicted(plan.name, row.call, row.seconds, everything.seconds(row.work), others.seconds(row.work))


def predicted_steps(*, graphs: bool = True) -> list[Predicted]:
    """End to end."""
    everything = fit(PLANS)
    return [
        Predicted(
            plan.name,
            "a step" if graphs else "a step, no graphs",
            plan.wall_s if graphs else plan.no_graph_wall_s,
            step_s(plan, costs_of(plan, everything, graphs=graphs)),
            step_s(plan, costs_of(plan, fit_without(plan), graphs=graphs)),
        )
        for plan in PLANS
    ]


def predicted_speedups() -> list[Predicted]:
    """Of the searched plans; each plan's seconds come from a fit without it."""
    steps = {step.plan: step for step in predicted_steps()}
    found = []
    for slow, fast in PAIRS:
        a, b = steps[slow], steps[fast]
        found.append(
            Predicted(fast, f"over {slow}", a.published / b.published, a.fitted / b.fitted, a.left_out / b.left_out)
        )
    return found


def unfitted_steps() -> Mapping[str, float]:
    """Seconds by law alone: nothing fitted, no launches, nothing between calls."""
    return {plan.name: step_s(plan, costs_of(plan, UNFITTED)) for plan in PLANS}


def order_is_right(steps: Mapping[str, float]) -> bool:
    """Whether plans are ordered as their published seconds are."""
    published = sorted(steps, key=lambda name: plan_named(name).wall_s)
    return sorted(steps, key=lambda name: steps[name]) == published
