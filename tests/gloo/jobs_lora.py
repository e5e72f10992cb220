"""Optimizer steps of a model with adapters on this job's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from oppo_megatron.config.model import LoraConfig, ModelConfig, OptimizerConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.lora import is_adapter
from oppo_megatron.mcore.roles import as_it_began, load_role, load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.hf_weights import export_weights
from tests.gloo.jobs_training import Minibatch, cached_outputs, full_outputs, loss_of
from tests.gloo.models import CPU, MAX_LENGTH, PATHS, gather_logits, world_groups


def train_adapters(
    models: dict[str, tuple[str, dict[str, Any]]],
    target: str,
    tp: int,
    pp: int,
    config: OptimizerConfig,
    data: list[Minibatch],
    probes: list[list[int]],
    layout: TrainingLayoutConfig,
) -> dict[str, Any]:
    groups = world_groups(tp, pp)
    answers = {}
    for name, (directory, settings) in models.items():
        head: Head = "scalar" if "scalar" in name else "lm"
        role = TrainedRoleConfig(checkpoint=Path(directory), lora=LoraConfig(**settings))
        chunks = load_training(role, layout, groups, head=head, role="model", max_length=MAX_LENGTH, device=CPU)
        frozen = [(p, p.detach().clone()) for chunk in chunks for p in chunk.parameters() if not p.requires_grad]
        plain = len(chunks) == 1 and not layout.sequence_parallel
        if plain:  # what decoding computes with is made before the steps, and reads adapters as they are
            chunks[0].decode_by("packed")
        trained = TrainedModel(chunks, config, len(data), layout)
        optimized = sum(p.numel() for group in trained.optimizer.param_groups for p in group["params"])
        trainable = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        assert optimized == trainable or trained.sharded, "the optimizer has adapters, and a scalar head, alone"
        assert 0 < trainable < sum(p.numel() for p, _ in frozen)
        reports = [trained.step(batch.share(groups).pack(), loss_of(chunks[0], batch.num_tokens)) for batch in data]
        assert all(torch.equal(p, before) for p, before in frozen), "a frozen weight has changed"
        out = cached_outputs(chunks[0], probes) if plain else full_outputs(chunks, probes)
        export_weights(chunks, Path(target) / name, base=Path(directory))
        answers[name] = {"norms": [r.grad_norm for r in reports], "losses": [r.stats.get("loss") for r in reports]}
        if out is not None:
            answers[name]["outputs"] = (out if head == "scalar" else gather_logits(out, chunks[0].vocab)).clone()
    return answers


def outputs_of_paths(directory: str, settings: dict[str, Any], tp: int, probes: list[list[int]]) -> dict[str, Any]:
    """Logits by each way of cached calls and by the full forward, with adapters and of the reference that shares weights."""
    groups = world_groups(tp, 1)
    role = TrainedRoleConfig(checkpoint=Path(directory), lora=LoraConfig(**settings))
    answers = {}
    for path in PATHS:
        model = load_role(role, groups, head="lm", max_length=MAX_LENGTH, device=CPU, path=path)
        bare, began = (as_it_began(model, groups, config) for config in (ModelConfig(), role))
        ours = dict(model.named_parameters())
        assert all(param is ours[name] for name, param in bare.named_parameters())
        assert all((param is ours[name]) != is_adapter(name) for name, param in began.named_parameters())
        assert not any(param.requires_grad for param in began.parameters())
        for whose, each in (("adapted", model), ("bare", bare)):
            out = cached_outputs(each, probes)
            assert out is not None
            answers[f"{whose}, {path}"] = gather_logits(out, model.vocab).clone()
        with torch.no_grad():  # as an update does
            for param in (param for name, param in ours.items() if is_adapter(name)):
                param.mul_(3.0)
        out = cached_outputs(began, probes)
        assert out is not None
        answers[f"began, {path}"] = gather_logits(out, model.vocab).clone()
    model = load_role(role, groups, head="lm", max_length=MAX_LENGTH, device=CPU)
    out = full_outputs([model], probes)
    assert out is not None
    answers["adapted, full"] = gather_logits(out, model.vocab).clone()
    return answers
