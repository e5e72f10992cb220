"""What the ranks of a large run hold by kind, from its plan of memory; nothing is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oppo_megatron.bench.planning import Cluster
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.holdings import rank_memory, train_holdings

GIBIBYTE = 2**30
COLUMNS = {
    "mode": "mode", "ranks": "ranks", "B": "sequences", "fullest rank": "rank", "weights": "weights", "copy": "copy",
    "grads": "gradients", "Adam": "optimizer", "KV cache": "kv_cache", "buffers": "buffers",
    "activations": "activations", "total GiB": "total",
}  # fmt: skip
"""GiB of the rank that holds most."""


def bench_memory(
    cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each combination.  Raises ConfigError before the first where one does not fit."""
    cases = [(m, n, batch, _on_gpus(cluster.config(m, n, batch))) for m in modes for n in ranks for batch in sequences]
    for mode, number, batch, config in cases:
        of_ranks = rank_memory(train_holdings(config, on_cpu=False))
        rank, memory = max(of_ranks.items(), key=lambda item: item[1].total)
        kinds = {kind: size / GIBIBYTE for kind, size in vars(memory).items()}
        total = memory.total / GIBIBYTE
        yield {"mode": mode, "ranks": number, "sequences": batch, "rank": rank, **kinds, "total": total}


def _on_gpus(config: TrainConfig) -> TrainConfig:
    """In bfloat16, updated with sequence parallelism where there are tensor ranks."""
    tree = config.model_dump()
    for name in ("actor", "critic", "reward"):
        tree[name]["dtype"] = "bfloat16"
    for name in ("actor", "critic"):
        tree[name]["train"]["sequence_parallel"] = config.placement.actor.tp > 1
    return TrainConfig.model_validate(tree)
