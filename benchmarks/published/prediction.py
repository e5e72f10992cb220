"""ReaL's steps, played from the seconds of their calls and predicted with five constants fitted to the other plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import lcm

import numpy as np

from benchmarks.fitting.nonnegative import relative_fit
from benchmarks.published.calls import UNFITTED, Constants, Work, features_of, parameters, work_of
from benchmarks.published.dataflow import Call, Carried, check, makespan_ns, nanoseconds, period_ns, play
from benchmarks.published.tables import GENERATION, GPUS_A_NODE, PAIRS, PLANS, SCORING, PublishedCall, PublishedPlan, plan_named
from oppo_megatron.sim.clusters.cluster import GB
from oppo_megatron.sim.laws import WIDTH

USES = (("ActorTrain", GENERATION), ("CriticTrain", "CriticInf"))
"""Calls that use trained weights next."""
TRAINED = tuple(Carried(used, trained) for trained, used in USES)
"""These wait for the previous step's training."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each call by name, of a node's NICs per byte, and between a call's end and its successors."""

    calls: Mapping[str, float]
    node_s_per_byte: float = 0.0
    between_s: float = 0.0

    @classmethod
    def printed(cls, plan: PublishedPlan, *, graphs: bool = True) -> Costs:
        """Return the published seconds."""
        seconds = {call.name: call.seconds for call in plan.calls}
        return cls(seconds if graphs else seconds | {GENERATION: plan.no_graph_s})


def step_calls(plan: PublishedPlan, costs: Costs, scoring: Sequence[str] = SCORING) -> list[Call]:
    """Return the calls of a step in the order that decides ties; `scoring` orders the scoring calls."""
    order = [GENERATION, *scoring, "CriticTrain", "ActorTrain"]
    moves = _moves(plan, costs)
    calls = list(moves)
    for name in order:
        call = plan.call(name)
        moved = [move.name for move in moves if move.name == _move_name(name)]
        duration = nanoseconds(costs.calls[name] + costs.between_s)
        calls.append(Call(name, frozenset(call.nodes), duration, (*call.parents, *moved)))
    return calls


def step_s(plan: PublishedPlan, costs: Costs, scoring: Sequence[str] = SCORING) -> float:
    """Return the seconds of one step, checked for overlaps."""
    calls = step_calls(plan, costs, scoring)
    spans = play(calls)
    check(calls, spans)
    return makespan_ns(spans) / 1e9


def steady_step_s(plan: PublishedPlan, costs: Costs) -> float:
    """Return the seconds of each further step; a model's use waits for its training."""
    calls = step_calls(plan, costs)
    names = {call.name for call in calls}
    moves = [Carried(_move_name(used), trained) for trained, used in USES if _move_name(used) in names]
    return period_ns(calls, [*TRAINED, *moves]) / 1e9


def tie_orders(plan: PublishedPlan, costs: Costs) -> dict[tuple[str, ...], float]:
    """Return the seconds of a step for every order of the three scoring calls, which are ready together."""
    return {order: step_s(plan, costs, order) for order in permutations(SCORING)}


def moved_bytes(plan: PublishedPlan, trained: str, used: str) -> float:
    """Return the bytes of weights that enter the node that lacks most."""
    source, target = plan.call(trained), plan.call(used)
    parts = lcm(source.pp, target.pp)
    held = {node: _parts(source, node, parts) for node in source.nodes}
    lacking = [len(_parts(target, node, parts) - held.get(node, set())) for node in target.nodes]
    return WIDTH * parameters(target) * max(lacking) / parts


def _moves(plan: PublishedPlan, costs: Costs) -> list[Call]:
    """Return the moves of weights; each keeps both meshes busy."""
    calls = []
    for trained, used in USES:
        num_bytes = moved_bytes(plan, trained, used)
        if num_bytes > 0 and costs.node_s_per_byte > 0:
            nodes = frozenset(plan.call(trained).nodes) | frozenset(plan.call(used).nodes)
            calls.append(Call(_move_name(used), nodes, nanoseconds(num_bytes * costs.node_s_per_byte)))
    return calls


def _move_name(used: str) -> str:
    return f"weights for {used}"


def _parts(call: PublishedCall, node: int, parts: int) -> set[int]:
    """Return which of `parts` of a model the node's ranks hold; stages are outermost, tensor ranks within a node."""
    first = call.nodes.index(node) * GPUS_A_NODE
    on_stage, each = call.tp * call.dp, parts // call.pp
    stages = {rank // on_stage for rank in range(first, first + GPUS_A_NODE)}
    return {part for stage in stages for part in range(stage * each, (stage + 1) * each)}


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
    """A published figure, and its predictions with constants fitted to all plans and to all but its own."""

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
    """Return the six calls of a plan, and generation without CUDA graphs."""
    rows = [Row(plan.name, call.name, call.seconds, work_of(call, plan.batch)) for call in plan.calls]
    captured_not = work_of(plan.call(GENERATION), plan.batch, graphs=False)
    return (*rows, Row(plan.name, NO_GRAPHS, plan.no_graph_s, captured_not))


def fit(plans: Iterable[PublishedPlan]) -> Constants:
    """Return the constants with the least squared relative error over the plans' rows."""
    rows = [row for plan in plans for row in rows_of(plan)]
    features = np.array([features_of(row.work) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    decode = np.array([row.work.decode_s for row in rows])
    return Constants(*map(float, relative_fit(features, seconds, decode)))


def fit_without(plan: PublishedPlan) -> Constants:
    return fit(other for other in PLANS if other is not plan)


def costs_of(plan: PublishedPlan, constants: Constants, *, graphs: bool = True) -> Costs:
    """Return all costs of a step by law: calls, moves of weights, time between calls."""
    seconds = {row.call: constants.seconds(row.work) for row in rows_of(plan)}
    without = seconds.pop(NO_GRAPHS)
    calls = seconds if graphs else {**seconds, GENERATION: without}
    return Costs(calls, constants.node_s_per_gb / GB, constants.call_s)


def predicted_calls() -> Iterator[Predicted]:
    """Yield the predictions of all rows of all plans."""
    everything = fit(PLANS)
    for plan in PLANS:
        others = fit_without(plan)
        for row in rows_of(plan):
            yield Predicted(plan.name, row.call, row.seconds, everything.seconds(row.work), others.seconds(row.work))


def predicted_steps(*, graphs: bool = True) -> list[Predicted]:
    """Return the predictions of whole steps."""
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
    """Return the predicted speed-ups; each plan's seconds come from a fit without it."""
    steps = {step.plan: step for step in predicted_steps()}
    found = []
    for slow, fast in PAIRS:
        a, b = steps[slow], steps[fast]
        found.append(Predicted(fast, f"over {slow}", a.published / b.published, a.fitted / b.fitted, a.left_out / b.left_out))
    return found


def unfitted_steps() -> Mapping[str, float]:
    """Return the seconds of steps by law alone, without fits, launches and time between calls."""
    return {plan.name: step_s(plan, costs_of(plan, UNFITTED)) for plan in PLANS}


def order_is_right(steps: Mapping[str, float]) -> bool:
    """True if the plans have the order of their published seconds."""
    published = sorted(steps, key=lambda name: plan_named(name).wall_s)
    return sorted(steps, key=lambda name: steps[name]) == published
