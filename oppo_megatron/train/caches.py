"""What is cached and computed of sequences in flight, a file a rank: KV caches and the scorers' outputs so far."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oppo_megatron.runtime.mcore.sequence_cache import SequenceCache
from oppo_megatron.runtime.rounds import RoundRunner

CACHED, OUTPUT = "kv", "out"


def save_caches(path: Path, rounds: RoundRunner) -> None:
    """Between two rounds.  Tensors are named `<role>.kv.<sequence>` and `<role>.out.<sequence>`."""
    tensors: dict[str, Tensor] = {}
    order: dict[str, list[int]] = {}
    for role, cache in _caches(rounds).items():
        order[role] = cache.seq_ids
        tensors |= {f"{role}.{CACHED}.{seq_id}": cache.stored(seq_id) for seq_id in cache.seq_ids}
    for role, station in rounds.scoring.items():
        tensors |= {f"{role}.{OUTPUT}.{seq_id}": values for seq_id, values in station.outputs().items()}
    save_file({name: values.cpu().contiguous() for name, values in tensors.items()}, path, {"slots": json.dumps(order)})


def load_caches(path: Path, rounds: RoundRunner) -> None:
    """Into empty caches, on the rank that wrote the file, in the same layout; every sequence in the slot that it had."""
    with safe_open(path, framework="pt") as file:
        order = json.loads(file.metadata()["slots"])
        names = file.keys()
        for role in _caches(rounds):
            cached = {seq_id: file.get_tensor(f"{role}.{CACHED}.{seq_id}") for seq_id in order[role]}
            if role == "actor":
                assert rounds.decode is not None
                rounds.decode.resume(cached)
                continue
            prefix = f"{role}.{OUTPUT}."
            outputs = {
                int(name.removeprefix(prefix)): file.get_tensor(name) for name in names if name.startswith(prefix)
            }
            rounds.scoring[role].resume(cached, outputs)


def _caches(rounds: RoundRunner) -> dict[str, SequenceCache]:
    caches = {role: station.cache for role, station in rounds.scoring.items()}
    return caches if rounds.decode is None else caches | {"actor": rounds.decode.cache}
