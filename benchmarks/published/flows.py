"""ReaL's PPO as a dataflow: its published plans at the prices of `oppo plan flow`, and the plans that the search finds.

    python -m benchmarks.published.flows --seconds 60

A published placement is played with its layouts, its number of sequences that generate at once, full recomputation as in its
engine, and micro-batches of 8,192 tokens, which are not its own, whatever memory it takes; the search keeps to 80 GB, less 10 %.
Nothing is fitted to ReaL's figures, except the host's time per layer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import run_script
from benchmarks.published.calls import NODE, NODE_BYTES_PER_S
from benchmarks.published.prediction import order_is_right
from benchmarks.published.tables import (
    CONTEXT_TOKENS,
    GENERATION,
    GPUS_A_NODE,
    MINIBATCHES,
    PLANS,
    PROMPT_TOKENS,
    SHAPES,
    PublishedPlan,
)
from oppo_megatron.cli.parser import count
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.shape import kv_bytes_per_token
from oppo_megatron.report.comparison import format_table
from oppo_megatron.sim.clusters.cluster import Between, assumed
from oppo_megatron.sim.flow.dataflow import Call, Dataflow
from oppo_megatron.sim.flow.placing import FlowSearch
from oppo_megatron.sim.flow.prices import Choice, FlowPrices
from oppo_megatron.sim.search.blocks import Block

NETWORK = Between(19e-6, NODE_BYTES_PER_S, 1, assumed("200 Gb/s per node, as ReaL's own search assumes"))
MODELS = {
    "ActorGen": "actor", "ActorTrain": "actor", "RewInf": "reward", "RefInf": "reference", "CriticInf": "critic",
    "CriticTrain": "critic",
}  # fmt: skip
KV_CACHE_MB = 4096
"""Most of a call's cache in the search; with whole caches, no plan of 70B fits."""
COLUMNS = {
    "plan": "plan", "what": "what", "published": "published", "at our prices": "priced", "error %": "error_percent",
    "found": "found_s", "no less than": "bound_s", "GB": "gb",
}  # fmt: skip


def dataflow(plan: PublishedPlan, kv_cache_mb: float) -> Dataflow:
    """The six calls of a published plan's PPO; its order decides ties."""
    outputs = {"ActorGen": ["responses"], "RewInf": ["scores"], "RefInf": ["log-probs"], "CriticInf": ["values"]}
    calls: list[dict[str, Any]] = []
    for call in plan.calls:
        inputs = [output for parent in call.parents for output in outputs[parent]]
        kind = "inference" if call.kind == "infer" else call.kind
        made = {"inputs": inputs or ["prompts"], "outputs": outputs.get(call.name, [])}
        calls.append({"name": call.name, "model": MODELS[call.name], "kind": kind, **made})
        calls[-1] |= {"minibatches": MINIBATCHES} if kind == "train" else {}
    shapes = {
        MODELS[call.name]: {"init": {**SHAPES[call.model], "max_position_embeddings": 8192}, "scalar": call.scalar}
        for call in plan.calls
    }
    tokens = {"prompt_tokens": PROMPT_TOKENS, "response_tokens": CONTEXT_TOKENS - PROMPT_TOKENS}
    run = {"runtime": {"kv_cache_mb": kv_cache_mb}}
    flow = Dataflow.model_validate({"batch": plan.batch, **tokens, "models": shapes, "calls": calls, "run": run})
    assert not flow.problems()
    return flow


@dataclass(frozen=True)
class PublishedPrices(FlowPrices):
    """Only the published ranks and layout of each call, whatever memory they take."""

    plan: PublishedPlan = PLANS[0]

    def choices(self, call: Call) -> dict[Block, list[Choice]]:
        own, (table, role) = self.plan.call(call.name), self.table(call)
        block, sizes = Block((own.nodes[0] - 1) * GPUS_A_NODE, len(own.nodes) * GPUS_A_NODE), Sizes(own.tp, own.pp, own.dp)
        every = table.phases(role, block.size, update=call.kind == "train")
        nothing = np.zeros((4, self.cluster.num_ranks))
        found = [
            Choice(block, *each[:3], nothing)
            for each in every
            if each[0] == sizes and (not each[1] or each[1].recompute == "full")
        ]
        return {block: found}


def compare(plan: PublishedPlan, seconds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each call, then one for the step."""
    cluster = replace(NODE, nodes=max(node for call in plan.calls for node in call.nodes), between=NETWORK)
    actor = plan.call(GENERATION)
    own_mb = (
        plan.batch
        / actor.dp
        / actor.micro_batches
        * CONTEXT_TOKENS
        * kv_bytes_per_token(SHAPES[actor.model], actor, "bfloat16")
        / 2**20
    )
    flow = dataflow(plan, own_mb + 1)
    played = FlowSearch(PublishedPrices(flow, cluster, full_lengths, plan=plan)).find()
    assert played is not None
    for event in played.events:
        if event.choice is not None:
            yield _row(plan, event.name, plan.call(event.name).seconds, (event.end_ns - event.start_ns) / 1e9)
    end = time.monotonic() + seconds
    found = FlowSearch(
        FlowPrices(dataflow(plan, KV_CACHE_MB), cluster, full_lengths), is_over=lambda: time.monotonic() > end
    ).find()
    own = (
        {}
        if found is None
        else {"found_s": found.step_ns / 1e9, "bound_s": found.bound_ns / 1e9, "gb": found.fullest_bytes / 1e9}
    )
    yield {**_row(plan, "a step", plan.wall_s, played.step_ns / 1e9), **own}


def full_lengths(config: TrainConfig) -> list[int]:
    return [config.rollout.max_response_tokens] * config.rollout.batch_size


def _row(plan: PublishedPlan, what: str, published: float, priced: float) -> dict[str, Any]:
    return {
        "plan": plan.name,
        "what": what,
        "published": published,
        "priced": priced,
        "error_percent": 100 * (priced / published - 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=count, default=60, metavar="N", help="time limit of each search; default 60")


def measure(args: argparse.Namespace) -> int:
    rows = [row for plan in PLANS for row in compare(plan, args.seconds)]
    print(format_table(COLUMNS, rows))
    steps = {row["plan"]: row["priced"] for row in rows if row["what"] == "a step"}
    print(f"the order of the plans is {'right' if order_is_right(steps) else 'wrong'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.published.flows", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
