"""Algorithm 1 of ReaL by clocks of devices, beside the paper's own formulation, and its published plans."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.dataflow import Call, Carried, Span, check, iterations, makespan_ns, nanoseconds, period_ns, play
from benchmarks.published.prediction import Costs, steady_step_s, step_calls, step_s, tie_orders
from benchmarks.published.tables import PLANS, plan_named
from oppo_megatron.errors import ScheduleError

DEVICES = 5


def by_last_of_mesh(
    calls: Sequence[Call], meshes: Sequence[frozenset[int]], newer: Callable[[Span, Span, Span], bool]
) -> dict[str, Span]:
    """Algorithm 1 as printed; `newer(other, own, new)`: the new call, after `own` on its mesh, replaces `other` as last."""
    spans: dict[str, Span] = {}
    last = {mesh: Span(0, 0) for mesh in {*meshes, *(call.devices for call in calls)}}
    queue = [(0, number) for number, call in enumerate(calls) if not call.parents]
    done: set[str] = set()
    while queue:
        ready, number = heapq.heappop(queue)
        call, own = calls[number], last[calls[number].devices]
        start = max(ready, own.end_ns)
        span = spans[call.name] = Span(start, start + call.duration_ns)
        last = {mesh: span if mesh & call.devices and newer(other, own, span) else other for mesh, other in last.items()}
        done.add(call.name)
        for child, other in enumerate(calls):
            if call.name in other.parents and done >= set(other.parents):
                heapq.heappush(queue, (max(spans[parent].end_ns for parent in other.parents), child))
    return spans


def corrected(other: Span, own: Span, new: Span) -> bool:
    return other.end_ns <= new.end_ns


def literal(other: Span, own: Span, new: Span) -> bool:
    return other.end_ns <= own.end_ns


@st.composite
def graphs(draw: st.DrawFn) -> list[Call]:
    count = draw(st.integers(1, 8))
    calls = []
    for number in range(count):
        devices = draw(st.frozensets(st.integers(0, DEVICES - 1), min_size=1))
        parents = draw(st.lists(st.sampled_from(range(number)), unique=True, max_size=3)) if number else []
        calls.append(Call(f"c{number}", devices, draw(st.integers(0, 9)), tuple(f"c{parent}" for parent in parents)))
    return calls


@given(graphs())
def test_clocks_of_devices_equal_the_last_of_every_mesh(calls: list[Call]) -> None:
    meshes = [frozenset(mesh) for size in range(1, DEVICES + 1) for mesh in combinations(range(DEVICES), size)]
    spans = play(calls)
    assert spans == by_last_of_mesh(calls, meshes, corrected)
    check(calls, spans)


def test_published_seconds_give_the_published_plans() -> None:
    played = {plan.name: step_s(plan, Costs.printed(plan)) for plan in PLANS}
    expected = {"70b-searched": 360.7, "70b-heuristic": 529.5, "7b-searched": 57.1, "7b-heuristic": 114.9}
    assert played == pytest.approx(expected, abs=0.05)
    walls = {plan.name: plan.wall_s for plan in PLANS}
    assert walls == {"70b-searched": 383.1, "70b-heuristic": 546.8, "7b-searched": 64.0, "7b-heuristic": 122.6}
    without = {plan.name: step_s(plan, Costs.printed(plan, graphs=False)) for plan in PLANS}
    expected = {"70b-searched": 525.0, "70b-heuristic": 895.0, "7b-searched": 75.3, "7b-heuristic": 175.3}
    assert without == pytest.approx(expected, abs=0.05)
    assert {plan.name: steady_step_s(plan, Costs.printed(plan)) for plan in PLANS} == pytest.approx(played)


def test_the_order_of_ties_decides() -> None:
    plan = plan_named("7b-searched")
    orders = tie_orders(plan, Costs.printed(plan))
    assert sorted(orders.values()) == pytest.approx([57.1] * 4 + [63.1] * 2)
    assert {order for order, seconds in orders.items() if seconds > 60} == {
        ("RewInf", "CriticInf", "RefInf"),
        ("RefInf", "CriticInf", "RewInf"),
    }
    for name in ("70b-searched", "70b-heuristic", "7b-heuristic"):
        assert len(set(tie_orders(plan_named(name), Costs.printed(plan_named(name))).values())) == 1


def test_the_guard_as_printed_overlaps_two_calls() -> None:
    plan = plan_named("7b-searched")
    calls = step_calls(plan, Costs.printed(plan))
    spans = by_last_of_mesh(calls, [frozenset({1}), frozenset({2}), frozenset({1, 2})], literal)
    assert makespan_ns(spans) == nanoseconds(55.1)
    with pytest.raises(ScheduleError, match=r"CriticInf begins on device 2 at 22\.3 s, while RefInf runs there until 24\.3"):
        check(calls, spans)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([Call("a", frozenset({0}), 1, ("b",)), Call("b", frozenset({0}), 1, ("a",))], "a, b wait for each other"),
        ([Call("a", frozenset({0}), 1, ("z",))], "a waits for z, which is not a call"),
        ([Call("a", frozenset(), 1)], "a has no device"),
        ([Call("a", frozenset({0}), 1), Call("a", frozenset({1}), 1)], "several calls have this name"),
        ([Call("a", frozenset({0}), -1)], "a lasts -1 ns"),
    ],
)
def test_graphs_that_cannot_run_are_refused(calls: list[Call], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        play(calls)


def test_a_period_counts_what_iterations_share() -> None:
    """Two devices in turn: alone, an iteration takes 5; beside its neighbours, as long as the busier device."""
    calls = [Call("a", frozenset({0}), 2), Call("b", frozenset({1}), 3, ("a",))]
    assert makespan_ns(play(calls)) == 5
    assert period_ns(calls, []) == 3
    assert period_ns(calls, [Carried("a", "b")]) == 5
    assert makespan_ns(play(iterations(calls, [], 4))) == 2 + 4 * 3
