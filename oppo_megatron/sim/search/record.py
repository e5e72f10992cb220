"""Content of `plan.json`, with constants and assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import named_roles, role_placements, training_placements, world_size
from oppo_megatron.layout.role_memory import laid_out, sequences_and_slots
from oppo_megatron.sim.laws import RATIO_NODES, RINGS
from oppo_megatron.sim.runs.step_costs import not_counted
from oppo_megatron.sim.search.planning import Task
from oppo_megatron.sim.search.playing import Played

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
        "notes": [*beyond_fits(task, plans[0].config), *not_counted(task.config)],
    }  # fmt: skip


def _plan(task: Task, each: Played) -> Record:
    config, blocks, options = each.config, each.plan.blocks, each.plan.options
    roles, groups = tuple(named_roles(config)), dict[Any, list[str]]()
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
                "ranks": format_ranks(block.ranks), "layout": str(option.serving), "serving_s": option.times.serving / 1e9,
                **({} if option.train is None else {
                    "training": str(option.training), "recompute": option.train.recompute,
                    "update_s": option.times.update / 1e9, "weights_s": option.times.weights / 1e9,
                }),
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
    """Yield in what the plan exceeds the fits, and whether sequences wait for cache slots."""
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
