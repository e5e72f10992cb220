"""The runs of the study of scale: who sits where, in the least layout that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oppo_megatron.bench.studies.assumptions import CHUNK, LONG, MICRO_BATCH_TOKENS
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.flops import Shape
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.reading import build_cluster
from oppo_megatron.sim.clusters.schema import ClusterConfig
from oppo_megatron.sim.published.shapes import llama_shape

NODE, GPU, NIC_GB_PER_S, MARGIN = 8, "h200", 50, 0.1
"""A node has a NIC of 400 Gb/s for each GPU; so much of the memory stays free."""
VOCABULARY = 128256
MODELS: Mapping[str, Shape] = {
    name: {**llama_shape(*sizes, VOCABULARY), "tie_word_embeddings": False}
    for name, sizes in {
        "8B": (4096, 14336, 32, 32, 8),
        "70B": (8192, 28672, 80, 64, 8),
        "405B": (16384, 53248, 126, 128, 8),
    }.items()
}
"""Llama 3.1 in its three sizes."""
SCORER = "8B"
"""Of critic and reward model; the reference is as large as the actor."""
SPLIT = 4
"""One rank in so many scores."""
TENSOR, PIPELINE = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8)
DELTA_SHARE = 8
"""Delta is an eighth of the batch."""


@dataclass(frozen=True)
class Layout:
    """tp and pp of the actor and of the reference; critic and reward model have the latter's tp, in one stage."""

    actor: tuple[int, int]
    reference: tuple[int, int]

    def config(self, model: str, ranks: int, batch: int, seed: int, delta_share: int = DELTA_SHARE) -> TrainConfig:
        """PPO with a critic, one epoch of one minibatch."""
        scoring = ranks // SPLIT
        train = {"recompute": "full"}
        delta = max(1, batch // delta_share)
        tree: dict[str, Any] = {
            "run_dir": "none", "seed": seed, "tokenizer": {"path": "none"},
            "data": {"path": "none", "max_prompt_tokens": LONG.prompt},
            "placement": {"actor": _sizes(*self.actor, ranks - scoring), "scorer": _sizes(self.reference[0], 1, scoring)},
            "actor": {"init": MODELS[model], "train": {**train, "sequence_parallel": self.actor[0] > 1}},
            "critic": {"init": MODELS[SCORER], "train": {**train, "sequence_parallel": self.reference[0] > 1}},
            "reference": {"init": MODELS[model], "parallel": _sizes(*self.reference, scoring)},
            "reward": {"init": MODELS[SCORER]}, "rewards": [{"kind": "model"}],
            "rollout": {"batch_size": batch, "max_response_tokens": LONG.limit},
            "overlap": {
                "chunk": {"tokens": CHUNK, "adaptive": False},
                "delta": {"rule": "fixed", "initial": delta, "max": delta},
            },
            "runtime": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "dtype": "bfloat16"},
            "debug": {"forced_lengths": [LONG.median, LONG.sigma]},
        }  # fmt: skip
        return TrainConfig.model_validate(tree)


def cluster_of(ranks: int, nic_gb_per_s: float = NIC_GB_PER_S) -> Cluster:
    between = {"gb_per_s": nic_gb_per_s, "nics": NODE} if ranks > NODE else None
    nodes = max(1, ranks // NODE)
    return build_cluster(
        ClusterConfig.model_validate({"nodes": nodes, "gpus_per_node": NODE, "gpu": GPU, "between": between})
    )


def least_layout(model: str, ranks: int, batch: int) -> tuple[Layout, float] | None:
    """The least tp x pp of both pools that fits, tensor ranks first, and the GB of the fullest rank; None where nothing fits."""
    room, scoring = (1 - MARGIN) * cluster_of(ranks).gpu.memory_bytes / 1e9, ranks // SPLIT
    actors, references = (list(_layouts(model, size, batch)) for size in (ranks - scoring, scoring))
    while actors and references:
        layout = Layout(actors[0], references[0])
        actor_gb, scorer_gb = _fullest(layout.config(model, ranks, batch, 0), ranks - scoring)
        if max(actor_gb, scorer_gb) <= room:
            return layout, max(actor_gb, scorer_gb)
        actors, references = actors[actor_gb > room :], references[scorer_gb > room :]
    return None


def _layouts(model: str, ranks: int, batch: int) -> Iterator[tuple[int, int]]:
    """tp and pp over so many ranks, with a sequence for each replica; the least first."""
    for tp, pp in ((tp, pp) for tp in TENSOR for pp in PIPELINE if pp == 1 or tp == NODE):
        whole = ranks % (tp * pp) == 0 and MODELS[model]["num_hidden_layers"] % pp == 0
        if whole and ranks // (tp * pp) <= batch and ranks // tp <= batch:
            yield tp, pp


def _fullest(config: TrainConfig, decoding: int) -> list[float]:
    """GB of the fullest rank of each pool; the first `decoding` ranks are the actor's."""
    held = rank_memory(train_holdings(config, on_cpu=False))
    sides = [[memory.total for rank, memory in held.items() if (rank < decoding) is own] for own in (True, False)]
    return [max(side) / 1e9 for side in sides]


def _sizes(tp: int, pp: int, ranks: int) -> dict[str, int]:
    return {"tp": tp, "pp": pp, "dp": ranks // (tp * pp)}
