"""Where a plan lies outside of what the laws were fitted to."""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements, training_placements, world_size
from oppo_megatron.layout.role_memory import laid_out, sequences_and_slots
from oppo_megatron.sim.laws.communication import RATIO_NODES
from oppo_megatron.sim.search.planning import Task

MOST_TP, MOST_TOKENS, MOST_NODES = 8, 32768, RATIO_NODES[-1]
"""Of the layers (1 to 32768 tokens on 1 to 8 tensor ranks) and of the rings over nodes."""


def beyond_fits(task: Task, config: TrainConfig) -> list[str]:
    """Lines that say so; empty where all lies within."""
    return list(_lines(task, config))


def _lines(task: Task, config: TrainConfig) -> Iterator[str]:
    places = {**role_placements(config), **{f"{name}, trained": p for name, p in training_placements(config).items()}}
    if wide := [name for name, place in places.items() if place.tp > MOST_TP]:
        yield f"beyond the fits: tp of {', '.join(wide)} is above {MOST_TP}, the most that layers were measured with"
    if (tokens := config.runtime.micro_batch_tokens) > MOST_TOKENS:
        yield f"beyond the fits: micro-batches of {tokens} tokens, measured were layers of up to {MOST_TOKENS}"
    nodes = -(-world_size(config) // task.cluster.gpus_per_node)
    if nodes > MOST_NODES:
        yield f"beyond the fits: {nodes} nodes; the efficiency of rings is known up to {MOST_NODES}, and taken as there"
    actor = role_placements(config)["actor"]
    sequences, slots = sequences_and_slots(config, "actor", actor, laid_out(config, "actor", actor, actor))
    if slots < sequences:
        yield (
            f"runtime.kv_cache_mb has room for {slots} of the {sequences} sequences that a replica of the actor may have; the "
            "others wait for a slot"
        )
    if task.cluster.gpu.sources["efficiencies"].kind == "assumed" and not task.scales.source:
        yield f"no layers of such a processor were measured: {task.cluster.gpu.sources['efficiencies'].where}"
