"""Seconds and memory of a dataflow's calls: each is priced as the role of a run that does the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import ValidationError

from oppo_megatron.config.explain import explain
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.flow.dataflow import Call, Dataflow
from oppo_megatron.sim.laws import Floats
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Weights, reallocation_s
from oppo_megatron.sim.search.blocks import Block, block_sizes, nanoseconds, part_starts
from oppo_megatron.sim.search.layouts import PriceTable, Steady


@dataclass(frozen=True, eq=False)
class Choice:
    """A call's ranks and layout; `held`: bytes [kind, rank] of weights, what else lasts, activations, kernels."""

    block: Block
    sizes: Sizes
    train: TrainingLayoutConfig | None
    time_ns: int
    held: Floats

    @property
    def where(self) -> tuple[Block, Sizes]:
        return self.block, self.sizes


@dataclass(frozen=True)
class FlowPrices:
    """`lengths`: of a batch's responses; `margin`: share of memory that stays free; `rollout`: further settings of it."""

    flow: Dataflow
    cluster: Cluster
    lengths: Callable[[TrainConfig], Sequence[int]]
    margin: float = 0.1
    rollout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        return int(self.cluster.gpu.memory_bytes * (1 - self.margin))

    def blocks(self) -> list[Block]:
        """Ranks of calls: nodes in a row, on up to two nodes also powers of two of a node's ranks."""
        per_node, every = self.cluster.gpus_per_node, Block(0, self.cluster.num_ranks)
        sizes = [n for n in block_sizes(self.cluster.nodes, per_node, [1]) if n >= per_node or n & (n - 1) == 0]
        return [Block(first, n) for n in reversed(sizes) for first in part_starts(every, n, per_node)]

    def run(self, call: Call, roles: Mapping[str, str], *given: Mapping[str, Any], **rollout: Any) -> TrainConfig:
        """A run with the sizes of `call`, phase after phase on one rank.  `roles`: their models.  Raises ConfigError."""
        (prompt, response), dtype = self.flow.tokens(call), "float32" if self.cluster.gpu.on_cpu else "bfloat16"
        runtime = {"dtype": dtype, "micro_batch_tokens": 8192}
        rollout |= {"batch_size": self.flow.batch, "max_response_tokens": response}
        ppo = {"minibatches": call.minibatches} | ({} if "reference" in roles else {"kl": {"mode": "none"}})
        data = {"path": "prompts.jsonl", "max_prompt_tokens": prompt}
        tree: dict[str, Any] = {"run_dir": "runs/flow", "tokenizer": {"path": "tokenizer"}, "data": data, "rollout": rollout}
        tree |= {"ppo": ppo, "runtime": runtime, "rewards": [{"kind": "model"}]}
        for own in given:
            tree |= {key: {**tree.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in own.items()}
        tree |= {role: self.flow.models[name].model_dump(include={"checkpoint", "init"}) for role, name in roles.items()}
        tree |= {"placement": {"mode": "single"}, "overlap": {"intra": False, "inter": False}}
        try:
            return TrainConfig.model_validate(tree)
        except ValidationError as error:
            raise ConfigError([f"run: {problem}" for problem in explain(TrainConfig, error)]) from error

    def table(self, call: Call) -> tuple[PriceTable, str]:
        """Return prices of a run that makes this call, and the role that does.  Raises ConfigError."""
        model, trained = self.flow.models[call.model], call.model in self.flow.trainers
        scorer = ("critic" if trained else "reward") if model.has_scalar_head else "reference"
        given = {key: value for key, value in self.flow.run.items() if key == "runtime"}
        roles = dict.fromkeys(("actor", "critic", "reference", "reward"), call.model)
        config = self.run(call, roles, given, group_size=1, **({} if call.response_tokens else self.rollout))
        decoding = Decoding(self.flow.tokens(call)[0], tuple(self.lengths(config)))
        table = PriceTable(config, self.cluster, decoding, Steady(decoding), self.budget)
        return table, scorer if call.kind == "inference" or scorer == "critic" else "actor"

    def choices(self, call: Call) -> dict[Block, list[Choice]]:
        """Layouts that fit, on each block, fastest first, without those that another beats in time and memory.

        Calls of one model in equal layouts share weights, so a model's layouts beat each other only if it has a single call.
        """
        (table, role), found = self.table(call), dict[int, list[Choice]]()
        alone, update = len(self.flow.calls_of(call.model)) == 1, call.kind == "train"
        for size in {block.size for block in self.blocks()}:
            kept = found[size] = list[Choice]()
            for sizes, train, time_ns, memory in sorted(table.phases(role, size, update=update), key=itemgetter(2)):
                lasting = [(m.weights + m.copy, m.total - m.weights - m.copy - m.activations - m.kernels) for m in memory]
                rows = np.array([(*kept_bytes, m.activations, m.kernels) for kept_bytes, m in zip(lasting, memory, strict=True)])
                held = np.zeros((4, self.cluster.num_ranks))
                held[:, :size] = rows.T.repeat(size // len(memory), axis=1)
                rivals = (each for each in kept if alone or each.sizes == sizes)
                if held.sum(axis=0).max() <= self.budget and not any((each.held <= held).all() for each in rivals):
                    kept.append(Choice(Block(0, size), sizes, train, time_ns, held))
        every = {block: found[block.size] for block in self.blocks()}
        return {b: [replace(each, block=b, held=np.roll(each.held, b.first, axis=1)) for each in own] for b, own in every.items()}

    def move_ns(self, name: str, source: Choice, target: Choice) -> int:
        """Nanoseconds to bring a model's trained weights to another of its placements."""
        model, pair = self.flow.models[name], (source, target)
        weights = (
            Weights(RolePlacement(each.block.ranks, *each.sizes[:3], each.sizes.cp, each.sizes.ep), each.sizes.vpp)
            for each in pair
        )
        return nanoseconds(reallocation_s(self.cluster, read_hf_config(model), *weights, scalar=model.has_scalar_head))
