"""The best plans, played in virtual time: what the closed form cannot tell.

Rounds, chunks, deferral and the order of scoring count here (`sim/runs`).  All plans play the same responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.schedule.weaving.costs import Costs, Linear, Lines
from oppo_megatron.sim.events.dataflow import nanoseconds
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.sources import cluster_costs
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep
from oppo_megatron.sim.search.exact import Clock
from oppo_megatron.sim.search.inner import chosen_chunk, with_chunk, with_delta
from oppo_megatron.sim.search.planning import Confirmed, Contest, Planned, Task
from oppo_megatron.sim.search.scales import Scales
from oppo_megatron.sim.search.step import Parts

MORE = 3
"""Finalists beyond the plans asked for."""
WARM_UP = 3
"""Steps that come before deferral is steady, at least."""
FEW, MANY, MOST_STEPS = 3, 5, 48
RESPONSES = 512, 2048
"""Steps that count of all plans and of the finalists: as many as have so many responses, from FEW or MANY to MOST_STEPS."""
LONG, MOST_LONG, LONG_RESPONSES = 8, 64, 4096
"""The same of deltas, which train other responses in a step."""
GAIN = 0.01
"""By this share a setting must shorten a step to replace the configuration's."""


def finished(planned: Planned, top: int, out_of_time: Clock) -> Planned:
    """Plans played for few steps, the fastest for more, `top` with a chunk and a delta that suit the first.

    By price, until no other can be the fastest: until the price, times the least ratio of played seconds to a price so far, lies
    above the fastest.  Where time runs out, those asked for and one more are played, for few steps; the others follow as they
    were.
    """
    task = planned.task
    if not planned.plans:
        return planned
    few, many = _steps(task)
    done = list[Confirmed]()
    for each in planned.plans:
        late = out_of_time()  # asked before each, since the clock also tells of the progress
        if len(done) > top and (late or (len(done) >= top + MORE and _cannot_win(each, done))):
            break
        done.append(played(task, each, few))
    done = _fastest_first(done)
    ratios, ended = [each.step_ns / each.plan.step_ns for each in done], not out_of_time()
    finalists = min(len(done), top + MORE) if ended else 0
    best = done[:finalists] if few == many else _fastest_first(played(task, each, many) for each in done[:finalists])
    best = [*_tuned_alike(task, best[:top], many, out_of_time), *best[top:]]
    contest = Contest(len(done), few, finalists, many, min(ratios), max(ratios), ended and not out_of_time())
    plans = (*best, *done[finalists:], *planned.plans[len(done) :])
    return replace(planned, plans=plans, contest=contest)


def _cannot_win(each: Confirmed, done: Sequence[Confirmed]) -> bool:
    least_ratio = min(1.0, *(other.step_ns / other.plan.step_ns for other in done))
    return each.plan.step_ns * least_ratio > min(other.step_ns for other in done)


def _steps(task: Task) -> tuple[int, int]:
    batch = task.config.rollout.batch_size
    few, many = (
        min(MOST_STEPS, max(least, responses // batch)) for least, responses in zip((FEW, MANY), RESPONSES, strict=True)
    )
    # Playing the best again costs the steps of their warm-up, too.
    return (many if many < 2 * few else few), many


def _fastest_first(plans: Iterable[Confirmed]) -> list[Confirmed]:
    return sorted(plans, key=lambda each: each.step_ns)


def _tuned_alike(task: Task, best: list[Confirmed], steps: int, out_of_time: Clock) -> list[Confirmed]:
    """All played with the chunk and the delta that the first does best with; fastest first."""
    if not best or out_of_time():
        return best
    first = tuned(task, best[0], steps, out_of_time)
    if out_of_time() or first.config.overlap == best[0].config.overlap:
        return [first, *best[1:]]
    others = [played(task, replace(each, config=_overlapped_as(first, each)), steps) for each in best[1:]]
    return _fastest_first([first, *others])


def _overlapped_as(first: Confirmed, each: Confirmed) -> TrainConfig:
    """With the chunk and the delta of `first`."""
    overlap = first.config.overlap
    return with_delta(with_chunk(each.config, overlap.chunk.tokens), overlap.delta.initial)


def played(task: Task, each: Confirmed, steps: int) -> Confirmed:
    """The plan with the seconds of its steps in virtual time, by part."""
    return replace(each, parts=mean_parts(counted_steps(task, each.config, steps)), played=True)


def played_ns(task: Task) -> int:
    """Nanoseconds of a step of the task's configuration in its own layouts, played for as many steps as finalists are."""
    return mean_parts(counted_steps(task, task.config, _steps(task)[1])).total


def mean_parts(steps: Sequence[VirtualStep]) -> Parts:
    """Means over steps, in nanoseconds."""
    names = ("decode_s", "score_exposed_s", "update_s", "critic_exposed_s", "reallocate_s", "idle_s")
    return Parts(*(nanoseconds(fmean(getattr(step.parts, name) for step in steps)) for name in names))


def counted_steps(task: Task, config: TrainConfig, steps: int) -> list[VirtualStep]:
    """So many steps, once the first responses, which all began together, have ended."""
    longest = max(task.lengths) if config.overlap.inter else 0
    costs, found = step_costs(task, config), list[VirtualStep]()
    run = VirtualRun(_without_search(config), costs, task.limit_of, "laps", prompt_tokens=task.prompt_tokens, endless=True)
    for step in run.steps(WARM_UP + longest + steps):
        if step.step > WARM_UP and step.clock > longest:
            found.append(step)
        if len(found) == steps:
            break
    return found


def tuned(task: Task, each: Confirmed, steps: int, out_of_time: Clock) -> Confirmed:
    """With the chunk and the delta of least seconds: chunks next to sqrt(f T / s), deltas up to the configuration's largest."""
    best = each
    for tokens in _chunks(task, best):
        if out_of_time():
            return best
        other = played(task, replace(best, config=with_chunk(best.config, tokens)), steps)
        best = other if other.step_ns < (1 - GAIN) * best.step_ns else best
    delta = best_delta(task, best, steps, out_of_time)
    return best if delta is None else played(task, replace(best, config=with_delta(best.config, delta)), steps)


def best_delta(task: Task, each: Confirmed, steps: int, out_of_time: Clock) -> int | None:
    """The delta of least seconds for a trained token; None for the configuration's, or where time runs out.

    All play the same responses; the better half go on to many steps.
    """
    own, sizes = each.config.overlap.delta.initial, _deltas(task, each)
    for count in (steps, min(MOST_LONG, max(LONG, LONG_RESPONSES // task.config.rollout.batch_size))):
        if len(sizes) < 2:
            return None
        paces = dict[int, float]()
        for size in sizes:
            if out_of_time():
                return None
            paces[size] = pace(counted_steps(task, with_delta(each.config, size), count))
        better = sorted(paces, key=lambda size: (paces[size], size))[: (len(sizes) + 1) // 2]
        sizes = [own, *(size for size in better if size != own)]
    best = min(paces, key=lambda size: (paces[size], size))
    return best if paces[best] < (1 - GAIN) * paces[own] else None


def pace(steps: Sequence[VirtualStep]) -> float:
    """Seconds of a trained token: in the long run every delta trains as many tokens in a step."""
    return sum(step.step_s for step in steps) / sum(int(step.lengths.sum()) for step in steps)


def step_costs(task: Task, config: TrainConfig) -> StepCosts:
    """By the laws, times what a run has measured of them."""
    cluster = task.on(world_size(config)).cluster
    costs = cluster_costs(config, cluster, task.prompt_tokens, task.lengths)
    scales = task.scales
    return replace(
        costs,
        actions=_scaled(costs.actions, scales),
        updates={role: _times(line, scales.update.get(role, 1.0)) for role, line in costs.updates.items()},
        moves={role: seconds * scales.weights for role, seconds in costs.moves.items()},
    )


def _chunks(task: Task, best: Confirmed) -> list[int]:
    if not best.config.overlap.intra:
        return []
    longest = max(task.lengths)
    cluster = task.on(world_size(best.config)).cluster
    middle = chosen_chunk(Prices(best.config, cluster, task.decoding), best.plan.options, longest)
    sizes = {max(1, middle // 2), middle, min(longest, 2 * middle)} - {best.config.overlap.chunk.tokens}
    return [size for size in sorted(sizes) if not task.check(with_chunk(best.config, size))]


def _deltas(task: Task, best: Confirmed) -> list[int]:
    """Sizes to try, the configuration's first."""
    delta = best.config.overlap.delta
    if not best.config.overlap.inter:
        return []
    sizes = {0, *(delta.max // part for part in (8, 4, 2, 1))} - {delta.initial}
    tried = [size for size in sorted(sizes) if not task.check(with_delta(best.config, size))]
    return [delta.initial, *tried]


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
