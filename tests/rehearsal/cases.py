"""What is rehearsed: small runs of the product, one for each layout and option that takes a way of its own on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.ppo import SHAPE

LORA = {"rank": 4, "targets": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """Changes to the plain configuration; `ranks` processes take part."""

    ranks: int = 1
    changes: dict[str, Any] = field(default_factory=dict)


PLAIN: dict[str, Any] = {
    "steps": 2,
    "runtime.device": "cuda",
    "runtime.decode_sync_steps": 4,
    "runtime.dtype": "bfloat16",
    "runtime.micro_batch_tokens": 128,
    "rollout.batch_size": 4,
    "rollout.max_response_tokens": 12,
    "ppo.epochs": 1,
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.chunk": {"tokens": 8, "adaptive": False},
    "overlap.delta": {"rule": "fixed", "initial": 1, "min": 0, "max": 2},
    "guards.logprob_gap.limit": None,
    "checkpoint.every_steps": 1,
    "runtime.timeout_s": 60,
}

CASES = {
    "single": Case(),
    "paged float32": Case(1, {"runtime.dtype": "float32", "runtime.kv_layout": "paged"}),
    "groups, whose prompts fork": Case(
        2, {"placement": {"mode": "disaggregated"}, "rollout.group_size": 2, "overlap.inter": False}
    ),
    "adapters": Case(1, {"actor.lora": LORA, "critic.lora": LORA}),
    "disaggregated": Case(2, {"placement": {"mode": "disaggregated"}}),
    "colocated tp 2": Case(2, {"placement": {"mode": "colocated", "actor": {"tp": 2}}}),
    "colocated pp 2": Case(2, {"placement": {"mode": "colocated", "actor": {"pp": 2}}}),
    "dp 2, updated as tp 2": Case(
        2,
        {
            "placement": {"mode": "colocated", "actor": {"dp": 2}},
            "actor.train": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        },
    ),
    "updated as pp 2": Case(
        2, {"placement": {"mode": "colocated", "actor": {"tp": 2}}, "actor.train": {"tp": 1, "pp": 2}}
    ),
    "updated as pp 2, interleaved": Case(
        2,
        {
            "placement": {"mode": "colocated", "actor": {"pp": 2}},
            "actor": {"init": SHAPE | {"num_hidden_layers": 4}, "train": {"vpp": 2}},
        },
    ),
}
