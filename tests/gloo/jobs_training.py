"""Optimizer steps on this job's ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.model import ModelConfig, OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.errors import NumericsError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore import training
from oppo_megatron.mcore.batch import MicroBatch, pack_together, split_rows
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.roles import load_training
from oppo_megatron.mcore.training import Loss, TrainedModel, forward_rows
from oppo_megatron.mcore.vocab import OutputRows
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.packing import balance
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import UpdateSettings, begin_update, run_update
from tests.gloo.models import (
    CPU,
    MAX_LENGTH,
    Whole,
    gather_logits,
    load,
    micro_batches,
    pass_on,
    stage_inputs,
    whole_logits,
    world_groups,
)

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

    def share(self, groups: RoleGroups) -> Minibatch:
        part = balance([len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)], groups.dp)
        mine = part[groups.dp_rank]
        return Minibatch(*([column[i] for i in mine] for column in (self.prompts, self.responses, self.numbers)))

    def pack(self, budget: int = 24, sharing: int = 2) -> list[MicroBatch]:
        """Neighbours share their prompt, `sharing` at most, so that groups of three are cut."""
        alike = [list(rows) for _, rows in groupby(range(len(self.prompts)), self.prompts.__getitem__)]
        units = [rows[k : k + sharing] for rows in alike for k in range(0, len(rows), sharing)]
        batches = pack_together([[(self.prompts[unit[0]], [self.responses[i] for i in unit])] for unit in units], budget, CPU)
        numbers_T, lengths = torch.tensor([x for row in self.numbers for x in row]), [len(row) for row in self.responses]
        for batch, piece in zip(
            batches, split_rows(numbers_T, [sum(lengths[i] for i in u) for u in units], batches), strict=True
        ):
            batch.extra["numbers"] = piece
        return batches


def loss_of(model: RoleModel, num_tokens: int) -> Loss:
    """Weighted log-likelihood and entropy of a language model, squared error of a scalar one; a mean over all tokens."""

    def loss(batch: MicroBatch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = batch.extra["numbers"]
        if model.head == "scalar":
            share = ((output - numbers) ** 2).sum() / num_tokens
        else:
            logprobs, entropy, _ = output.figures(batch.targets_R, TEMPERATURE)
            share = -(numbers * logprobs + ENTROPY_WEIGHT * entropy).sum() / num_tokens
        return share, {"loss": share.detach(), "max_tokens": torch.tensor(float(len(batch.tokens_T)))}

    return loss


def train(
    directories: dict[str, str], target: str, tp: int, pp: int, config: OptimizerConfig, data: list[Minibatch],
    probes: list[list[int]], layout: TrainingLayoutConfig, bucket_size: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    groups = world_groups(tp, pp, layout.cp, layout.ep)
    buckets = partial(training.DistributedDataParallelConfig, bucket_size=bucket_size)
    with mock.patch.object(training, "DistributedDataParallelConfig", buckets):
        return {
            name: _train_one(directory, Path(target) / name, groups, config, data, probes, layout)
            for name, directory in directories.items()
        }


def _train_one(
    directory: str, target: Path, groups: RoleGroups, config: OptimizerConfig, data: list[Minibatch], probes: list[list[int]],
    layout: TrainingLayoutConfig,
) -> dict[str, Any]:  # fmt: skip
    head: Head = "scalar" if "scalar" in directory else "lm"
    chunks = load_chunks(directory, groups, head, layout)
    params = [param for chunk in chunks for param in chunk.parameters()]
    trained = TrainedModel(chunks, config, len(data), layout)
    sharded = groups.copies > 1
    small = (trained.ddp[0].ddp_config.bucket_size or 10**9) < 10**4
    assert not small or len(trained.ddp[0].bucket_groups) > 3, "gradients are reduced in several buckets"
    optimized = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
    assert sharded or optimized == set(map(id, params)), "the optimizer's tensors are the model's"
    packed = {"sharing": 1 if layout.cp > 1 else 2, "budget": 12 if layout.ep > 1 and groups.dp_rank == 0 else 24}
    reports = [trained.step(batch.share(groups).pack(**packed), loss_of(chunks[0], batch.num_tokens)) for batch in data]
    assert not any(chunk.training for chunk in chunks)
    assert params == [param for chunk in chunks for param in chunk.parameters()]
    plain = len(chunks) == layout.ep == 1 and not layout.sequence_parallel
    out = cached_outputs(chunks[0], probes) if plain else full_outputs(chunks, probes)
    export_weights(chunks, target)
    answer: dict[str, Any] = {
        "grad_norm": [r.grad_norm for r in reports], "lr": [r.lr for r in reports], "stats": [r.stats for r in reports],
        "filled up": _filled_up(chunks), "experts": _experts(trained),
    }  # fmt: skip
    if out is not None:
        answer["outputs"] = (out if head == "scalar" else gather_logits(out, chunks[0].vocab)).clone()
    return answer


def _experts(trained: TrainedModel) -> dict[str, int]:
    """Numbers that this rank holds for experts that replicas divide."""
    weights = [param for chunk in trained.chunks for param in chunk.parameters() if not getattr(param, "allreduce", True)]
    buffers = [buffer for ddp in trained.ddp for buffer in ddp.expert_parallel_buffers]
    moments = [
        value.numel()
        for optimizer in trained.optimizer.chained_optimizers
        if optimizer.param_groups[0]["is_expert_parallel"]
        for state in optimizer.optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    return {
        "weights": sum(param.numel() for param in weights), "gradients": sum(b.grad_data.numel() for b in buffers),
        "moments": sum(moments),
    }  # fmt: skip


def _filled_up(chunks: list[RoleModel]) -> float:
    rows = [
        param[chunk.vocab.num_tokens :].detach().abs().flatten()
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if name.endswith("word_embeddings.weight") or (name == "output_layer.weight" and chunk.head == "lm")
    ]
    return float(torch.cat([torch.zeros(1), *rows]).max())


def load_chunks(directory: str, groups: RoleGroups, head: Head, layout: TrainingLayoutConfig) -> list[RoleModel]:
    config = ModelConfig(checkpoint=Path(directory))
    return load_training(config, layout, groups, head=head, role="model", max_length=MAX_LENGTH, device=CPU)


def cached_outputs(model: RoleModel, probes: Sequence[list[int]]) -> Tensor | None:
    cache = model.new_cache(len(probes))
    for seq_id in range(len(probes)):
        cache.open(seq_id)
    inputs = stage_inputs(model, torch.tensor([token for probe in probes for token in probe]))
    out = step(model, cache, list(range(len(probes))), list(map(len, probes)), inputs)
    pass_on(model, out)
    if not model.groups.is_last_stage:
        return None
    return model.logits(out) if model.head == "lm" else out


def full_outputs(chunks: Sequence[RoleModel], probes: Sequence[list[int]]) -> Tensor | None:
    batches = micro_batches([Whole(probe, list(range(len(probe)))) for probe in probes], size=1)

    def finish(batch: MicroBatch, out: Any) -> Tensor:
        return whole_logits(out, len(batch.rows)) if chunks[0].head == "lm" else out

    outputs = forward_rows(chunks, batches, finish)
    return torch.cat(outputs) if outputs else None


def updates(
    directory: str, target: str, tp: int, pp: int, lengths: list[tuple[int, int]], begin: str = "",
    layout: TrainingLayoutConfig | None = None,
) -> tuple[list[dict[str, float]], tuple[int, int]]:  # fmt: skip
    """Reports of `run_update`, and forward passes; `begin`: begin it before, with the `same` batch or with the `others`."""
    layout = layout or TrainingLayoutConfig()
    groups = world_groups(tp, pp, layout.cp, layout.ep)
    (model,) = chunks = load_chunks(directory, groups, "lm", layout)
    dice = torch.Generator().manual_seed(4)

    def tokens(num: int) -> list[int]:
        return torch.randint(1, 64, (num,), generator=dice).tolist()

    batch = [Rollout(Prompt(i, i, "", tuple(tokens(prompt))), i, tokens(answer)) for i, (prompt, answer) in enumerate(lengths)]
    weights_T = torch.rand(sum(len(rollout.tokens) for rollout in batch), generator=dice)

    def loss(micro: MicroBatch, output: OutputRows, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
        logp_R = output.figures(micro.targets_R).logp_R
        share = -(logp_R * micro.extra["weights"]).sum() / num_tokens
        stats = {"loss": share.detach(), "max_logp": logp_R.detach().max(), "first": torch.tensor(float(first))}
        return share, stats | {"tokens": torch.tensor(float(len(logp_R)))}

    trained = TrainedModel(chunks, OptimizerConfig(lr=0.01), total_steps=8, layout=layout)
    settings = UpdateSettings(epochs=2, minibatches=3, micro_batch_tokens=20, seed=3, step=1, device=CPU)
    outputs = watched_outputs(trained)
    if begin:
        begin_update(trained, batch if begin == "same" else list(reversed(batch)), settings)
    before = len(outputs)
    reports = run_update(trained, batch, {"weights": weights_T}, loss, settings)
    assert not model.training and not any(held() is not None for held in outputs), "no forward pass waits for a step"
    export_weights(model, Path(target))
    return reports, (before, len(outputs) - before)


def watched_outputs(trained: TrainedModel) -> list[weakref.ref[Tensor]]:
    outputs: list[weakref.ref[Tensor]] = []
    trained.ddp[0].register_forward_hook(lambda _module, _inputs, out: outputs.append(weakref.ref(out)))
    return outputs


def begun_and_abandoned(directory: str, tp: int) -> list[tuple[bool, bool]]:
    """Whether decoding is made fast and an output is held: before an update is begun, when it is, when abandoned."""
    model = load(directory, world_groups(tp, 1))
    trained = TrainedModel(model, OptimizerConfig(lr=0.1), total_steps=4)
    algorithm = Algorithm(AlgorithmConfig(), PPOConfig(), group_size=1, longest=64)
    actor = Actor(TrainedRole(trained, model, None), algorithm, TEMPERATURE)
    batch = [Rollout(Prompt(i, i, "", (1 + i, 7)), i, [3, 4, 5 + i]) for i in range(4)]
    settings = UpdateSettings(epochs=1, minibatches=1, micro_batch_tokens=20, seed=3, step=1, device=CPU)
    probes, seen, outputs = [[1, 2, 3, 4], [9, 8, 7]], [], watched_outputs(trained)

    def look() -> None:
        seen.append((model.fused is not None, any(held() is not None for held in outputs)))

    look()
    before = cached_outputs(model, probes)
    actor.begin(batch, settings)
    look()
    actor.abandon()
    look()
    after = cached_outputs(model, probes)
    assert before is not None and after is not None and torch.equal(before, after)
    return seen


def learning_rates(directory: str, config: OptimizerConfig, total_steps: int, steps: int, data: Minibatch) -> list[float]:
    model = load(directory, world_groups(1, 1))
    trained, loss = TrainedModel(model, config, total_steps), loss_of(model, data.num_tokens)
    return [trained.step(data.pack(), loss).lr for _ in range(steps)]


def refused_step(directory: str, tp: int, pp: int, data: list[Minibatch]) -> str:
    model = load(directory, world_groups(tp, pp))
    trained = TrainedModel(model, OptimizerConfig(lr=0.1), total_steps=4)
    before = [p.detach().clone() for p in model.parameters()]
    plain = loss_of(model, data[0].num_tokens)

    def broken(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share, stats = plain(batch, output)
        return share * (float("nan") if model.groups.dp_rank == 0 else 1.0), stats

    try:
        trained.step(data[0].pack(), broken)
    except NumericsError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        trained.step(data[0].pack(), plain)  # the next good step works
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(error)
    return "no error"
