"""A step of a plan as calls on ranks, which `sim/events/dataflow.py` plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from oppo_megatron.sim.events.dataflow import Call, play
from oppo_megatron.sim.search.step import StepRule, Times

Kind = Literal["decode", "score", "update", "send"]


class PhaseSpan(NamedTuple):
    """When a role's phase runs, in nanoseconds from the step's beginning."""

    role: str
    kind: Kind
    start_ns: int
    end_ns: int


def step_calls(rule: StepRule, times: Sequence[Times]) -> list[Call]:
    """Streamed scoring waits for nothing but its ranks; else it waits for decoding.  Updates wait for all scores."""
    devices = {role: frozenset(home.ranks) for role, home in zip(rule.roles, rule.homes, strict=True)}
    actor, *scorers = rule.roles
    before = () if rule.mode.streams else (f"{actor} decode",)
    calls = [Call(f"{actor} decode", devices[actor], times[0].serving)]
    for role, own in zip(scorers, times[1:], strict=True):
        calls.append(Call(f"{role} score", devices[role], own.serving, before))
    scored = tuple(call.name for call in calls)
    for role, own in zip(rule.roles, times, strict=True):
        if own.update:
            calls.append(Call(f"{role} update", devices[role], own.update, scored))
    for role, own in zip(rule.roles, times, strict=True):
        if own.weights:
            calls.append(Call(f"{role} send", devices[role], own.weights, (f"{role} update",)))
    return calls


def phase_spans(rule: StepRule, times: Sequence[Times]) -> Iterator[PhaseSpan]:
    """As they are played, in the order of roles."""
    spans = play(step_calls(rule, times))
    for role in rule.roles:
        for kind in ("decode", "score", "update", "send"):
            span = spans.get(f"{role} {kind}")
            if span is not None:
                yield PhaseSpan(role, kind, span.start_ns, span.end_ns)
