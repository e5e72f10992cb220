"""A step of a published plan as a dataflow graph: its calls on nodes, and the moves of weights to where they are used next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import lcm

from oppo_megatron.sim.events.dataflow import Call, Carried, check, makespan_ns, nanoseconds, period_ns, play
from oppo_megatron.sim.laws.layer import WIDTH
from oppo_megatron.sim.published.calls import parameters
from oppo_megatron.sim.published.tables import GENERATION, GPUS_A_NODE, SCORING, PublishedCall, PublishedPlan

USES = (("ActorTrain", GENERATION), ("CriticTrain", "CriticInf"))
"""Where trained weights are used next."""
TRAINED = tuple(Carried(used, trained) for trained, used in USES)
"""They wait for the training of the step before."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each call by name; of the NICs of a node for a byte; and between a call's end and what waits for it."""

    calls: Mapping[str, float]
    node_s_per_byte: float = 0.0
    between_s: float = 0.0

    @classmethod
    def printed(cls, plan: PublishedPlan, *, graphs: bool = True) -> Costs:
        """As published."""
        seconds = {call.name: call.seconds for call in plan.calls}
        return cls(seconds if graphs else seconds | {GENERATION: plan.no_graph_s})


def step_calls(plan: PublishedPlan, costs: Costs, scoring: Sequence[str] = SCORING) -> list[Call]:
    """The calls of a step in the order that decides ties; of scoring it is `scoring`."""
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
    """Seconds of one step, checked against overlaps."""
    calls = step_calls(plan, costs, scoring)
    spans = play(calls)
    check(calls, spans)
    return makespan_ns(spans) / 1e9


def steady_step_s(plan: PublishedPlan, costs: Costs) -> float:
    """Seconds that each further step takes, where a model's generation and inference wait for its training."""
    calls = step_calls(plan, costs)
    names = {call.name for call in calls}
    moves = [Carried(_move_name(used), trained) for trained, used in USES if _move_name(used) in names]
    return period_ns(calls, [*TRAINED, *moves]) / 1e9


def tie_orders(plan: PublishedPlan, costs: Costs) -> dict[tuple[str, ...], float]:
    """Seconds of a step for every order of the three scoring calls, which are always ready together."""
    return {order: step_s(plan, costs, order) for order in permutations(SCORING)}


def moved_bytes(plan: PublishedPlan, trained: str, used: str) -> float:
    """Bytes of weights that enter the node which lacks most of what it is to hold."""
    source, target = plan.call(trained), plan.call(used)
    parts = lcm(source.pp, target.pp)
    held = {node: _parts(source, node, parts) for node in source.nodes}
    lacking = [len(_parts(target, node, parts) - held.get(node, set())) for node in target.nodes]
    return WIDTH * parameters(target) * max(lacking) / parts


def _moves(plan: PublishedPlan, costs: Costs) -> list[Call]:
    """A move keeps both meshes busy."""
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
    """Of a model cut into `parts`, those that the node's ranks hold: stages lie outermost, tensor ranks within a node."""
    first = call.nodes.index(node) * GPUS_A_NODE
    on_stage, each = call.tp * call.dp, parts // call.pp
    stages = {rank // on_stage for rank in range(first, first + GPUS_A_NODE)}
    return {part for stage in stages for part in range(stage * each, (stage + 1) * each)}
