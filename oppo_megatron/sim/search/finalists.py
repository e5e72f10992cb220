"""The best plans of overlapped rounds, played in virtual time: what the closed form cannot tell.

Rounds, chunks, deferral and the order of scoring count here (`sim/runs`).  All plans play the same responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines
from oppo_megatron.sim.events.dataflow import nanoseconds
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.sources import cluster_costs
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun
from oppo_megatron.sim.search.exact import Clock
from oppo_megatron.sim.search.inner import chosen_chunk, with_chunk, with_delta
from oppo_megatron.sim.search.planning import Confirmed, Planned, Task
from oppo_megatron.sim.search.scales import Scales
from oppo_megatron.sim.search.step import Parts

MORE = 3
"""Plans that are played beyond those asked for."""
WARM_UP = 3
"""Steps that come before deferral is steady."""
STEPS, MOST_STEPS, RESPONSES = 8, 40, 1024
"""Steps that are played: as many as have so many responses, within both."""
GAIN = 0.01
"""By this share a setting must shorten a step to replace the configuration's."""


def finished(planned: Planned, top: int, out_of_time: Clock) -> Planned:
    """Where phases overlap: the best plans played, the fastest of these first and tuned; the others follow as they were.

    Where time runs out, fewer are played.
    """
    task = planned.task
    if not (planned.plans and (task.mode.streams or task.config.overlap.inter)):
        return planned
    count, done = top + MORE, list[Confirmed]()
    for each in planned.plans[:count]:
        if done and out_of_time():
            break
        done.append(played(task, each))
    done.sort(key=lambda each: each.step_ns)
    if not out_of_time():
        done[0] = tuned(task, done[0])
    return replace(planned, plans=(*done, *planned.plans[len(done) :]))


def played(task: Task, each: Confirmed) -> Confirmed:
    """The plan with the seconds of its steps in virtual time, by part."""
    costs = step_costs(task, each.config)
    steady = _without_search(each.config)
    prompt_tokens = task.config.data.max_prompt_tokens
    run = VirtualRun(steady, costs, task.limit_of, "laps", prompt_tokens=prompt_tokens, endless=True)
    count = min(MOST_STEPS, max(STEPS, RESPONSES // steady.rollout.batch_size))
    parts = [step.parts for step in run.steps(count)][WARM_UP:]
    spent = [
        nanoseconds(fmean(getattr(part, name) for part in parts))
        for name in ("decode_s", "score_exposed_s", "update_s", "critic_exposed_s", "reallocate_s", "idle_s")
    ]
    return replace(each, parts=Parts(*spent), played=True)


def tuned(task: Task, each: Confirmed) -> Confirmed:
    """With the chunk and the delta of least seconds: chunks next to sqrt(f T / s), deltas up to the configuration's largest."""
    best = each
    for config in _variants(task, best, _chunks(task, best)):
        best = _better(task, best, config)
    for config in _variants(task, best, _deltas(best)):
        best = _better(task, best, config)
    return best


def step_costs(task: Task, config: TrainConfig) -> StepCosts:
    """By the laws, times what a run has measured of them."""
    cluster = task.on(world_size(config)).cluster
    costs = cluster_costs(config, cluster, config.data.max_prompt_tokens, task.lengths)
    scales = task.scales
    return replace(
        costs,
        actions=_scaled(costs.actions, scales),
        updates={role: _times(line, scales.update.get(role, 1.0)) for role, line in costs.updates.items()},
        moves={role: seconds * scales.weights for role, seconds in costs.moves.items()},
    )


def _better(task: Task, best: Confirmed, config: TrainConfig) -> Confirmed:
    other = played(task, replace(best, config=config))
    return other if other.parts.total < (1 - GAIN) * best.parts.total else best


def _variants(task: Task, best: Confirmed, settings: list[tuple[str, int]]) -> Iterator[TrainConfig]:
    for name, value in settings:
        yield (with_chunk if name == "chunk" else with_delta)(best.config, value)


def _chunks(task: Task, best: Confirmed) -> list[tuple[str, int]]:
    longest = max(task.lengths)
    cluster = task.on(world_size(best.config)).cluster
    middle = chosen_chunk(Prices(best.config, cluster, task.decoding), best.plan.options, longest)
    own = best.config.overlap.chunk.tokens
    return [("chunk", size) for size in sorted({max(1, middle // 2), middle, min(longest, 2 * middle)} - {own})]


def _deltas(best: Confirmed) -> list[tuple[str, int]]:
    delta = best.config.overlap.delta
    if not best.config.overlap.inter:
        return []
    sizes = {delta.min, delta.max // 4, delta.max // 2, delta.max} - {delta.initial}
    return [("delta", size) for size in sorted(sizes) if size >= delta.min]


def _without_search(config: TrainConfig) -> TrainConfig:
    """Chunks stay, so that few steps tell what many would."""
    chunk = config.overlap.chunk.model_copy(update={"adaptive": False})
    return config.model_copy(update={"overlap": config.overlap.model_copy(update={"chunk": chunk})})


def _scaled(costs: Costs, scales: Scales) -> Costs:
    decode = scales.serving.get("actor", 1.0)
    prefill = {role: _all_times(lines, scales.serving.get(role, 1.0)) for role, lines in costs.prefill.items()}
    return replace(costs, decode=_all_times(costs.decode, decode), sample=_times(costs.sample, decode), prefill=prefill)


def _all_times(lines: Lines, factor: float) -> Lines:
    return _times(lines, factor) if isinstance(lines, Linear) else tuple(_times(line, factor) for line in lines)


def _times(line: Linear, factor: float) -> Linear:
    return Linear(line.fixed_s * factor, line.per_token_s * factor)
