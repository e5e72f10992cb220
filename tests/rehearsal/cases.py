"""Rehearsed cases: small runs of the product, one for each layout and option that takes a way of its own on a GPU."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.ppo import SHAPE

EXPERTS = SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = SHAPE | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0}
OSS = SHAPE | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}
OLMO = SHAPE | {"model_type": "olmo2"}
LORA = {"rank": 4, "targets": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """Changes to the plain configuration of the command `oppo {kind}`; `ranks` processes take part.

    `ring`: transformer-engine passes keys and values of context parallelism.
    """

    ranks: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = "train"
    ring: bool = False


SYNC_STEPS = 4
"""Decode steps between two reads."""
PLAIN: dict[str, Any] = {
    "steps": 2, "runtime.device": "cuda", "runtime.dtype": "bfloat16", "runtime.micro_batch_tokens": 128,
    "rollout.batch_size": 4, "rollout.max_response_tokens": 12, "ppo.epochs": 1, "overlap.intra": True, "overlap.inter": True,
    "overlap.chunk": 8, "overlap.delta": {"rule": "fixed", "initial": 1, "max": 2}, "guards.logprob_gap": None,
    "checkpoint.every_steps": 1, "runtime.timeout_s": 60,
}  # fmt: skip
WITHOUT_CRITIC: dict[str, Any] = {"critic": None, "ppo": {"epochs": 1}, "overlap.inter": False}
PAIRS: dict[str, Any] = WITHOUT_CRITIC | {
    "reward": None, "rewards": [{"kind": "python", "entry_point": "tests.e2e.rewards:level", "options": {"flat": []}}],
    "algorithm": {"preset": "online_dpo"}, "rollout.temperature": 0.9, "runtime.micro_batch_tokens": 256,
}  # fmt: skip
PREFERENCES: dict[str, Any] = {
    "steps": 2, "epochs": 2, "batch_size": 4, "max_tokens": 64, "model": {"init": SHAPE},
    "runtime": {"device": "cuda", "dtype": "bfloat16", "micro_batch_tokens": 128, "timeout_s": 60},
    "evaluation": {"fraction": 0.25}, "logging": {"console": "off"},
}  # fmt: skip
"""Pairs, and their held-out rows, on a single rank."""


def on_two(layout: dict[str, int], *, ring: bool = False, **changes: Any) -> Case:
    return Case(2, {"placement": {"mode": "colocated", "actor": layout}} | changes, ring=ring)


CASES = {
    "single": Case(),
    "paged float32": Case(1,
        {"runtime.dtype": "float32", "runtime.kv_layout": "paged",
        "rewards": [{"kind": "process", "step_rewards": "potential"}, {"kind": "verifier", "name": "arithmetic"}]}),
    "groups, whose prompts fork": Case(2,
        {"placement": {"mode": "disaggregated"}, "rollout.group_size": 2, "overlap.inter": False}),
    "adapters, dense": Case(1, {"runtime.kv_layout": "dense", "actor.lora": LORA, "critic.lora": LORA}),
    "disaggregated": Case(2, {"placement": {"mode": "disaggregated"}, "overlap.carry": "keep", "ppo.staleness": "decoupled",
        "algorithm.ratio": "sequence"}),
    "colocated tp 2": on_two({"tp": 2}), "colocated pp 2": on_two({"pp": 2}),
    "dp 2, updated as tp 2": on_two({"dp": 2}, **{"actor.train": {"tp": 2, "sequence_parallel": True, "recompute": "full"}}),
    "dp 2, updated as cp 2": on_two(
        {"dp": 2}, **{"actor.train": {"cp": 2, "recompute": "selective"}, "critic.train": {"tp": 2, "dp": 1}}),
    "dp 2, updated as cp 2 in a ring": on_two({"dp": 2}, ring=True, **{
        "actor.train": {"cp": 2, "recompute": "full"}, "critic.train": {"tp": 2, "dp": 1}}),
    "updated as pp 2": on_two({"tp": 2}, **{"actor.train": {"tp": 1, "pp": 2}}),
    "updated as pp 2, interleaved": on_two({"pp": 2}, actor={"init": SHAPE | {"num_hidden_layers": 4}, "train": {"vpp": 2}}),
    "trained on another rank": Case(3,
        {"placement": {"mode": "disaggregated"}, "actor.train": {"ranks": "2"}, "critic.ranks": "2"}),
    "trained on another rank meanwhile": Case(3,
        {"placement": {"mode": "disaggregated"}, "actor.train": {"ranks": "2"}, "overlap.continuous": {"lag_steps": 4},
        "overlap.carry": "redraw"}),
    "experts": Case(1, {"actor.init": EXPERTS, "critic.init": EXPERTS}),
    "experts, dp 2, updated as ep 2": on_two(
        {"dp": 2}, **{"actor.init": EXPERTS, "actor.train": {"ep": 2, "recompute": "full"}, "critic.train": {"tp": 2, "dp": 1}}),
    "experts, tp 2": on_two({"tp": 2}, **{"actor.init": EXPERTS, "actor.train": {"sequence_parallel": True}}),
    "soft caps and norms after layers, tp 2": on_two({"tp": 2}, **{
        "actor.init": GEMMA, "critic.init": OLMO, "reward.init": GEMMA, "runtime.kv_layout": "dense",
        "actor.train": {"sequence_parallel": True}}),
    "soft caps, paged": Case(1, {"actor.init": GEMMA, "critic.init": GEMMA}),
    "sinks and biased experts": Case(1, {"actor.init": OSS, "critic.init": OSS}),
    "sinks and biased experts, tp 2, dense": on_two({"tp": 2}, **{
        "actor.init": OSS, "critic.init": OSS, "runtime.kv_layout": "dense", "actor.train": {"sequence_parallel": True}}),
    "sinks and biased experts, dp 2, updated as ep 2": on_two({"dp": 2}, **{
        "actor.init": OSS, "critic.init": OSS, "actor.train": {"ep": 2}, "critic.train": {"tp": 2, "dp": 1}}),
    "remax": Case(2, WITHOUT_CRITIC | {"algorithm": {"preset": "remax"}, "placement": {"mode": "disaggregated"}}),
    "pairs": Case(1, PAIRS), "pairs, dp 2": on_two({"dp": 2}, **PAIRS),
    "dpo": Case(1, {"dpo": {"loss": "sigmoid", "nll": 0.1}}, "dpo"), "sft, tp 2": Case(2, {"parallel": {"tp": 2}}, "sft"),
    "dpo, cp 2": Case(2, {"parallel": {"cp": 2}}, "dpo"),
    "sft, cp 2 in a ring": Case(2, {"parallel": {"cp": 2}}, "sft", ring=True),
    "kto, tp 2": Case(2, {"dpo": {"loss": "kto"}, "parallel": {"tp": 2}}, "dpo"),
}  # fmt: skip
