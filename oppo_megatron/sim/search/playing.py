"""Play the cheapest plans in virtual time, all with the same responses, and describe them (`plan.json`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from statistics import fmean
from typing import Any

from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import named_roles, role_placements, training_placements, world_size
from oppo_megatron.layout.role_memory import laid_out, rank_memory, sequences_and_slots, train_holdings
from oppo_megatron.schedule.weaving.costs import Linear
from oppo_megatron.sim.laws import RATIO_NODES, RINGS
from oppo_megatron.sim.pricing.prices import Prices
from oppo_megatron.sim.runs.continuous import run_of
from oppo_megatron.sim.runs.step_costs import StepCosts, cluster_costs, not_counted
from oppo_megatron.sim.runs.virtual import Parts, VirtualStep
from oppo_megatron.sim.search.blocks import TRAINERS
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.planning import Task, planned_config

WARM_UP = 3
"""Fewest first steps that do not count."""
FEW, MANY, MOST_STEPS = 3, 5, 32
RESPONSES = 256, 1024
"""Responses that counted steps need, of all plans and of the fastest: FEW or MANY steps at least, MOST_STEPS at most."""
LONG, MOST_LONG, LONG_RESPONSES = 8, 32, 2048
"""The same to compare deltas, which train different responses in a step."""
CHUNK, DELTA = "overlap.chunk", "overlap.delta.initial"
CHUNKS = (16, 1024)
GAIN = 0.01
"""A setting replaces the configuration's if it shortens a step by at least this share."""


@dataclass(frozen=True)
class Played:
    plan: Plan
    config: TrainConfig
    parts: Parts
    rank_bytes: Sequence[float]

    @property
    def step_s(self) -> float:
        return self.parts.total

    @property
    def fullest_bytes(self) -> float:
        return max(self.rank_bytes)


def play_plans(task: Task, plans: Sequence[Plan], top: int, tell: Callable[[str], None] = lambda _: None) -> list[Played]:
    """Return the fastest `top`. Stops when a price, times the least ratio of played time to price, exceeds the fastest.

    `tell`: of progress.
    """
    few, many = (
        min(MOST_STEPS, max(least, responses // task.config.rollout.batch_size))
        for least, responses in zip((FEW, MANY), RESPONSES, strict=True)
    )
    done = list[Played]()
    for plan in plans:
        if len(done) > top:
            ratio = min(1.0, *(each.step_s * 1e9 / each.plan.step_ns for each in done))
            if plan.step_ns * ratio > 1e9 * min(each.step_s for each in done):
                break
        tell(f"playing the best plans: {len(done)} played for {few} steps")
        done.append(play_plan(task, plan, planned_config(task.config, plan), few))
    best = _fastest(done)[: top + 1]
    tell(f"playing the fastest {len(best)} of {len(done)} plans for {many} steps, and other chunks and deltas")
    best = _fastest([play_plan(task, each.plan, each.config, many) for each in best])[:top]
    if not best:
        return []
    first = _tuned(task, best[0], many)
    overlap = first.config.overlap
    if overlap == best[0].config.overlap:
        return best
    tuned = {CHUNK: overlap.chunk, DELTA: overlap.delta.initial}
    played = [play_plan(task, each.plan, each.config.with_values(tuned), many) for each in best[1:]]
    return _fastest([first, *played])


def play_config(task: Task, config: TrainConfig) -> Parts:
    steps = min(MOST_STEPS, max(MANY, RESPONSES[1] // config.rollout.batch_size))
    return _mean_parts(counted_steps(task, config, steps))


def play_plan(task: Task, plan: Plan, config: TrainConfig, steps: int) -> Played:
    memory = rank_memory(train_holdings(config, on_cpu=task.on_cpu))
    parts = _mean_parts(counted_steps(task, config, steps))
    return Played(plan, config, parts, [memory[rank].total for rank in sorted(memory)])


def _fastest(plans: Sequence[Played]) -> list[Played]:
    return sorted(plans, key=lambda each: each.step_s)


def _mean_parts(steps: Sequence[VirtualStep]) -> Parts:
    return Parts(*(fmean(column) for column in zip(*(step.parts for step in steps), strict=True)))


def counted_steps(task: Task, config: TrainConfig, steps: int) -> list[VirtualStep]:
    """Steps after the responses that began together have ended."""
    longest = max(task.lengths) if config.overlap.inter else 0
    fixed = config.with_values({CHUNK: config.overlap.chunk_tokens})  # so that a few steps represent many
    run = run_of(fixed, task_costs(task, config), task.limit_of, prompt_tokens=task.prompt_tokens, endless=True)
    found = list[VirtualStep]()
    for step in run.steps(WARM_UP + longest + steps):
        if step.step > WARM_UP and step.clock > longest:
            found.append(step)
        if len(found) == steps:
            break
    return found


def task_costs(task: Task, config: TrainConfig) -> StepCosts:
    return cluster_costs(config, task.cluster_of(world_size(config)), task.prompt_tokens, task.lengths)


def _tuned(task: Task, first: Played, steps: int) -> Played:
    best = first
    for tokens in _chunks(task, first) if first.config.overlap.intra else ():
        sizes = first.config.overlap.chunk_sizes
        searched = list(dict.fromkeys([tokens, *sizes]))
        config = first.config.with_values({CHUNK: tokens if len(sizes) == 1 else searched})
        if not task.check(config):
            other = play_plan(task, first.plan, config, steps)
            best = other if other.step_s < (1 - GAIN) * best.step_s else best
    delta = best_delta(task, best.config, steps)
    return best if delta is None else play_plan(task, best.plan, best.config.with_values({DELTA: delta}), steps)


def _chunks(task: Task, first: Played) -> list[int]:
    """Sizes around sqrt(f T / s), which balances the cost of rounds and the last chunk's exposed scoring. f: seconds of a round;
    T: decode steps per step; s: scoring seconds per decode step.
    """
    longest = max(task.lengths)
    costs = Prices(first.config, task.cluster_of(world_size(first.config)), task.decoding).costs()
    scorers = {role: lines for role, lines in costs.prefill.items() if role != "actor"}
    lines = [line for own in scorers.values() for line in ((own,) if isinstance(own, Linear) else own)]
    round_s = costs.message_s + sum(line.fixed_s for line in lines) + len(scorers) * costs.score.fixed_s
    scoring_s = sum(option.times.serving for option in first.plan.options[1:]) / 1e9 / longest
    best = sqrt(round_s * longest / scoring_s) if scoring_s else CHUNKS[0]
    middle = min(2 ** round(log2(min(max(best, CHUNKS[0]), CHUNKS[1]))), longest)
    return sorted({max(1, middle // 2), middle, min(longest, 2 * middle)} - {first.config.overlap.chunk_tokens})


def best_delta(task: Task, config: TrainConfig, steps: int) -> int | None:
    """Delta of least seconds per trained token; None: the configuration's."""
    delta, own = config.overlap.delta, config.overlap.delta.initial
    if not config.overlap.inter:
        return None
    sizes = {0, *(delta.max // part for part in (8, 4, 2, 1))} - {own}
    tried = [own, *(size for size in sorted(sizes) if not task.check(config.with_values({DELTA: size})))]
    paces = dict[int, float]()
    for count in (steps, min(MOST_LONG, max(LONG, LONG_RESPONSES // config.rollout.batch_size))):
        if len(tried) < 2:
            return None
        paces = {size: pace(counted_steps(task, config.with_values({DELTA: size}), count)) for size in tried}
        better = sorted(paces, key=lambda size: (paces[size], size))[: (len(tried) + 1) // 2]
        tried = [own, *(size for size in better if size != own)]
    best = min(paces, key=lambda size: (paces[size], size))
    return best if paces[best] < (1 - GAIN) * paces[own] else None


def pace(steps: Sequence[VirtualStep]) -> float:
    """Seconds per trained token: every delta trains the same tokens per step in the long run."""
    return sum(step.step_s for step in steps) / sum(int(step.lengths.sum()) for step in steps)


PARTS = {
    "decode_s": "prompts and decoding", "score_exposed_s": "scoring that nothing hides", "update_s": "the actor's update",
    "critic_exposed_s": "the critic's update", "reallocate_s": "moves of weights", "idle_s": "waiting for busier ranks",
}  # fmt: skip
MOST_TP, MOST_TOKENS, MOST_NODES = 8, 32768, RATIO_NODES[-1]
"""Limits of the measurements that the laws were fitted to: tensor ranks and tokens of layers, nodes of rings."""

Record = dict[str, Any]


def to_record(task: Task, plans: Sequence[Played], places: int) -> Record:
    gpu, lengths = task.cluster.gpu, task.lengths
    constants = {name: str(source) for name, source in task.cluster.sources()}
    if task.cluster.between is not None:
        constants["rings over nodes"] = str(RINGS)
    return {
        "cluster": {
            "nodes": task.cluster.nodes, "gpus_per_node": task.cluster.gpus_per_node, "gpu": gpu.name,
            "memory_gb": gpu.memory_bytes / 1e9, "margin": task.margin,
        },
        "work": {
            "responses": len(lengths), "mean_tokens": sum(lengths) / len(lengths), "longest": max(lengths),
            "prompt_tokens": task.prompt_tokens, "overlapped": task.mode.streams,
        },
        "placements": places,
        "reason": _reason(plans),
        "plans": [_plan(task, each) for each in plans],
        "constants": constants,
        "notes": [*beyond_fits(task, plans[0].config), *not_counted(plans[0].config)],
    }  # fmt: skip


def _plan(task: Task, each: Played) -> Record:
    config, blocks, options = each.config, each.plan.blocks, each.plan.options
    roles, groups = (*named_roles(config), TRAINERS)[: len(blocks)], dict[Any, list[str]]()
    for role, block in zip(roles, blocks, strict=True):
        groups.setdefault((block.first, block.size), []).append(role)
    return {
        "name": " | ".join(f"{', '.join(names)} on {size}" for (_, size), names in sorted(groups.items())),
        "step_s": each.step_s,
        "price_s": each.plan.step_ns / 1e9,
        **each.parts._asdict(),
        "longest_part": max(PARTS, key=lambda name: getattr(each.parts, name)),
        "chunk": config.overlap.chunk_tokens,
        "delta": config.overlap.delta.initial if config.overlap.inter else 0,
        "micro_batch_tokens": config.runtime.micro_batch_tokens,
        "fullest_rank": max(range(len(each.rank_bytes)), key=lambda rank: (each.rank_bytes[rank], -rank)),
        "fullest_gb": each.fullest_bytes / 1e9,
        "free_gb": (task.cluster_of(world_size(config)).gpu.memory_bytes - each.fullest_bytes) / 1e9,
        "roles": {
            role: {
                "ranks": format_ranks(block.ranks),
                **({} if role == TRAINERS else {"layout": str(option.serving), "serving_s": option.times.serving / 1e9}),
                **({} if option.train is None else {
                    "training": str(option.training), "recompute": option.train.recompute,
                    "update_s": option.times.update / 1e9,
                }),
                **({"weights_s": option.times.weights / 1e9} if role in ("actor", "critic") else {}),
            }
            for role, block, option in zip(roles, blocks, options, strict=True)
        },
    }  # fmt: skip


def _reason(plans: Sequence[Played]) -> str:
    best = plans[0]
    if len(plans) < 2:
        return f"a step takes {best.step_s:.3g} s"
    worse, following = plans[1].step_s / best.step_s - 1, plans[1].parts
    gains = {name: getattr(following, name) - getattr(best.parts, name) for name in PARTS}
    part = max(gains, key=lambda name: gains[name])
    return (
        f"a step takes {best.step_s:.3g} s; the next plan takes {worse:.1%} longer, most of it in {PARTS[part]}: "
        f"{getattr(best.parts, part):.3g} s per step against {getattr(following, part):.3g}"
    )


def beyond_fits(task: Task, config: TrainConfig) -> Iterator[str]:
    """Yield the limits of fits that the plan exceeds, and whether sequences wait for cache slots."""
    places = {**role_placements(config), **{f"{name}, trained": p for name, p in training_placements(config).items()}}
    if wide := [name for name, place in places.items() if place.tp > MOST_TP]:
        yield f"beyond the fits: tp of {', '.join(wide)} is above {MOST_TP}, the most that layers were measured with"
    if (tokens := config.runtime.micro_batch_tokens) > MOST_TOKENS:
        yield f"beyond the fits: micro-batches of {tokens} tokens; layers were measured up to {MOST_TOKENS}"
    nodes = -(-world_size(config) // task.cluster.gpus_per_node)
    if nodes > MOST_NODES:
        yield f"beyond the fits: {nodes} nodes; the efficiency of rings is known up to {MOST_NODES}, and taken from there"
    actor = role_placements(config)["actor"]
    sequences, slots = sequences_and_slots(config, "actor", actor, laid_out(config, "actor", actor, actor))
    if slots < sequences:
        yield (
            f"runtime.kv_cache_mb has room for {slots} of the {sequences} sequences that a replica of the actor may have; the "
            "others wait for a slot"
        )
    if (laws := task.cluster.gpu.sources["efficiencies"]).kind == "assumed":
        yield f"layers of such a processor were not measured: {laws.where}"
