"""`plan.json`: what a search found, and by which constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oppo_megatron.config.explain import first_problem
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.layouts import format_ranks
from oppo_megatron.nesting import read_json
from oppo_megatron.sim.laws.communication import RINGS
from oppo_megatron.sim.runs.sources import not_counted
from oppo_megatron.sim.search.calls import phase_spans
from oppo_megatron.sim.search.exact import Search
from oppo_megatron.sim.search.explain import bounded_by, reason
from oppo_megatron.sim.search.fitted import beyond_fits
from oppo_megatron.sim.search.planning import Confirmed, Contest, Planned, Task
from oppo_megatron.sim.search.record_schema import PRINTED

VERSION = 2
Record = dict[str, Any]


def to_record(planned: Planned, kind: str, seed: int, seconds: float) -> Record:
    """What does not depend on the clock; but for a search that ran out of time."""
    task, found, least_ns = planned.task, planned.found, min(each.plan.step_ns for each in planned.plans)
    bound_ns = min(found.bound_ns, least_ns)
    places = sum(len(search.arrangements) for search in planned.searches)
    return {
        "version": VERSION,
        "search": {
            "kind": kind, "seed": seed, "seconds": seconds, "ended": found.ended, "places": places,
            "looked_at": found.looked_at, "bound_s": bound_ns / 1e9, "gap": least_ns / bound_ns - 1,
            "micro_batch_tokens": sorted(planned.sizes),
        },
        "contest": None if planned.contest is None else asdict(planned.contest) | _beyond(planned, planned.contest),
        "cluster": {
            "nodes": task.cluster.nodes, "gpus_per_node": task.cluster.gpus_per_node, "gpu": task.cluster.gpu.name,
            "memory_gb": task.cluster.gpu.memory_bytes / 1e9, "margin": task.margin,
        },
        "work": {
            "responses": len(task.lengths), "mean_tokens": sum(task.lengths) / len(task.lengths),
            "longest": max(task.lengths), "prompt_tokens": task.prompt_tokens,
            "overlapped": task.mode.streams,
        },
        "reason": reason(planned),
        "plans": [_plan(planned, each) for each in planned.plans],
        "prices": [row for search in planned.searches for row in _prices(search)],
        "constants": dict(_constants(task)),
        "beyond_fits": [*beyond_fits(task, planned.plans[0].config), *not_counted(task.config)],
    }  # fmt: skip


def _beyond(planned: Planned, contest: Contest) -> Record:
    """How far the played seconds of the first plan lie above the least price, and the least price of plans not played.

    The latter have other ranks or layouts of the actor: of each, the one of least price is played.
    """
    prices = [each.plan.step_ns for each in planned.plans]
    rest = [price for price in (*prices[contest.plans :], planned.found.rest_ns) if price is not None]
    least_ns = min(planned.found.bound_ns, *prices)
    return {
        "least_s": least_ns / 1e9, "gap": planned.plans[0].step_ns / least_ns - 1,
        "others_s": min(rest) / 1e9 if rest else None,
    }  # fmt: skip


def read_record(path: Path) -> Record:
    """What `to_record` made.  Raises ConfigError for another file, or one of another version."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; --again takes the plan.json that `oppo plan` has written")
    try:
        record = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; --again takes the plan.json that `oppo plan` has written") from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise ConfigError(
            f"{path} is of version {version!r}, but this `oppo plan` reads version {VERSION}; search again, or print it with "
            "the release that wrote it"
        )
    try:
        PRINTED.validate_python(record)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {first_problem(error)}; the file is not as `oppo plan` wrote it; search again"
        ) from error
    return dict(record)


def _plan(planned: Planned, each: Confirmed) -> Record:
    parts = {f"{name}_s": value / 1e9 for name, value in each.parts._asdict().items()}
    roles = planned.table.roles
    return {
        "name": name_of(planned, each),
        "step_s": each.step_ns / 1e9,
        "price_s": each.plan.step_ns / 1e9,
        "played": each.played,
        "chunk": each.config.overlap.chunk.tokens,
        "delta": each.config.overlap.delta.initial if each.config.overlap.inter else 0,
        "micro_batch_tokens": each.config.runtime.micro_batch_tokens,
        **parts,
        "fullest_rank": max(range(len(each.rank_bytes)), key=lambda rank: (each.rank_bytes[rank], -rank)),
        "fullest_gb": each.fullest_bytes / 1e9,
        "margin_gb": (planned.task.cluster.gpu.memory_bytes - each.fullest_bytes) / 1e9,
        "bounded_by": bounded_by(planned, each),
        "roles": {
            role: {
                "ranks": format_ranks(home.ranks), "layout": str(option.serving), "serving_s": option.times.serving / 1e9,
                **({} if option.train is None else {
                    "training": str(option.training), "recompute": option.train.recompute,
                    "update_s": option.times.update / 1e9, "weights_s": option.times.weights / 1e9,
                }),
            }
            for role, home, option in zip(roles, each.plan.homes, each.plan.options, strict=True)
        },
        "spans": [
            {
                "role": span.role, "kind": span.kind, "start_s": span.start_ns / 1e9,
                "seconds": (span.end_ns - span.start_ns) / 1e9,
            }
            for span in phase_spans(planned.rule(each.plan), [option.times for option in each.plan.options])
        ],
    }  # fmt: skip


def name_of(planned: Planned, each: Confirmed) -> str:
    """The actor's layouts and how the others live beside it: `tp 4 x pp 1 x dp 1 on 4 | critic, reward on 4`."""
    roles, homes = planned.table.roles, each.plan.homes
    groups: dict[Any, list[str]] = {}
    for role, home in zip(roles, homes, strict=True):
        groups.setdefault((home.first, home.size), []).append(role)
    return " | ".join(f"{', '.join(names)} on {size}" for (_, size), names in sorted(groups.items()))


def _prices(search: Search) -> Iterator[Record]:
    """The options that were not dropped, of the homes that were opened."""
    for (role, size), stack in sorted(search.opened.items()):
        for option in stack.options:
            yield {
                "role": role, "ranks": size, "layout": str(option.serving),
                **({} if option.train is None else {
                    "training": str(option.training), "recompute": option.train.recompute,
                }),
                "nanoseconds": list(option.times), "fullest_gb": option.profile.fullest / 1e9,
            }  # fmt: skip


def _constants(task: Task) -> Iterator[tuple[str, str]]:
    yield from ((name, str(source)) for name, source in task.cluster.sources())
    if task.cluster.between is not None:
        yield "rings over nodes", str(RINGS)
    if task.scales.source:
        yield "factors on phases", task.scales.source


def constants_of(record: Mapping[str, Any]) -> Iterator[str]:
    """The lines that say where the constants are from."""
    yield from (f"{name}: {source}" for name, source in record["constants"].items())
