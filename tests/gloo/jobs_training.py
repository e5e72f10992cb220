"""Optimizer steps on this job's ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oppo_megatron.config.model import OptimizerConfig
from oppo_megatron.errors import NumericsError
from oppo_megatron.runtime.batch import MicroBatch, pack_responses, split_rows
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.hf_weights import export_weights
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.training import Loss, TrainedModel
from oppo_megatron.runtime.mcore.vocab_parallel import gather_logits, token_logprobs
from oppo_megatron.runtime.pipeline import StageCall, StageRunner
from tests.gloo.models import CPU, load, world_groups

ENTROPY_WEIGHT = 0.05
TEMPERATURE = 0.8


@dataclass
class Minibatch:
    """Sequences, and a number for every response token: a weight of its log-prob, or the value it should have."""

    prompts: list[list[int]]
    responses: list[list[int]]
    numbers: list[list[float]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))

    def pack(self, budget: int = 24) -> list[MicroBatch]:
        batches = pack_responses(self.prompts, self.responses, budget, CPU)
        numbers_T = torch.tensor([x for row in self.numbers for x in row])
        for batch, piece in zip(batches, split_rows(numbers_T, list(map(len, self.responses)), batches), strict=True):
            batch.extra["numbers"] = piece
        return batches


def loss_of(model: RoleModel, num_tokens: int) -> Loss:
    """Weighted log-likelihood and entropy of a language model, squared error of a scalar one; a mean over all tokens."""

    def loss(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = batch.extra["numbers"]
        if model.head == "scalar":
            share = ((output - numbers) ** 2).sum() / num_tokens
        else:
            group = model.groups.collection.tp
            logprobs, entropy = token_logprobs(output, batch.targets_R, group, TEMPERATURE)
            share = -(numbers * logprobs + ENTROPY_WEIGHT * entropy).sum() / num_tokens
        return share, {"loss": share.detach(), "max_tokens": torch.tensor(float(len(batch.tokens_T)))}

    return loss


def train(
    directories: dict[str, str],
    target: str,
    tp: int,
    pp: int,
    config: OptimizerConfig,
    data: list[Minibatch],
    probes: list[list[int]],
) -> dict[str, Any]:
    """Train each model, write it below `target`, and say what every step and the cached decode afterwards gave."""
    groups = world_groups(tp, pp)
    return {
        name: _train_one(directory, Path(target) / name, groups, config, data, probes)
        for name, directory in directories.items()
    }


def _train_one(
    directory: str,
    target: Path,
    groups: RoleGroups,
    config: OptimizerConfig,
    data: list[Minibatch],
    probes: list[list[int]],
) -> dict[str, Any]:
    head = "scalar" if "scalar" in directory else "lm"
    model = load(directory, groups, head)  # type: ignore[arg-type]
    cache = model.new_cache(len(probes))
    addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
    trained = TrainedModel(model, config, total_steps=len(data))
    optimized = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
    assert trained.ddp.module is model and optimized == {id(p) for p in model.parameters()}
    reports = [trained.step(batch.pack(), loss_of(model, batch.num_tokens)) for batch in data]
    # The optimizer's tensors are the ones that decode.
    assert not model.training and len(addresses) == len(optimized)
    for seq_id in range(len(probes)):
        cache.open(seq_id)
    call = StageCall(list(range(len(probes))), list(map(len, probes)), list(itertools.chain(*probes)))
    outputs = StageRunner(model, cache).run([call])
    export_weights(model, model.shape, target, head=head, tp_group=groups.collection.tp, pp_group=groups.collection.pp)  # type: ignore[arg-type]
    answer: dict[str, Any] = {
        "grad_norm": [r.grad_norm for r in reports],
        "lr": [r.lr for r in reports],
        "stats": [r.stats for r in reports],
    }
    if outputs:
        out = outputs[0] if head == "scalar" else gather_logits(outputs[0], groups.collection.tp)
        answer["outputs"] = out.clone()
    return answer


def refused_step(directory: str, tp: int, pp: int, data: list[Minibatch]) -> str:
    """A gradient that is not finite: the error, after checking that the weights stayed as they were."""
    model = load(directory, world_groups(tp, pp))
    trained = TrainedModel(model, OptimizerConfig(lr=0.1), total_steps=4)
    before = [p.detach().clone() for p in model.parameters()]
    plain = loss_of(model, data[0].num_tokens)

    def broken(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share, stats = plain(batch, output)
        return share * float("nan"), stats

    try:
        trained.step(data[0].pack(), broken)
    except NumericsError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        trained.step(data[0].pack(), plain)  # the next good step works
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(error)
    return "no error"


def bfloat16_steps(directory: str, tp: int, pp: int, data: list[Minibatch], num_steps: int) -> list[float]:
    """Losses of repeated steps on one minibatch in bfloat16 with float32 master weights."""
    model = load(directory, world_groups(tp, pp), dtype="bfloat16")
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    trained = TrainedModel(model, OptimizerConfig(lr=1e-3), total_steps=num_steps)
    masters = [p for group in trained.optimizer.param_groups for p in group["params"]]
    assert all(p.dtype == torch.float32 for p in masters) and len(masters) == len(list(model.parameters()))
    batch = data[0]
    reports = [trained.step(batch.pack(), loss_of(model, batch.num_tokens)) for _ in range(num_steps)]
    sums = sorted(float(p.to(torch.bfloat16).double().sum()) for p in masters)
    assert sums == sorted(float(p.double().sum()) for p in model.parameters()), "what decodes is the rounded master"
    return [r.stats["loss"] for r in reports if r.stats]
