"""Mixed precision on this job's ranks: updates too small for bfloat16, and what its two forwards say of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.config.model import OptimizerConfig
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import TrainedModel
from tests.gloo.jobs_training import Minibatch, cached_outputs, full_outputs, loss_of
from tests.gloo.models import load, world_groups

SMALL = OptimizerConfig(lr=1e-4, weight_decay=0.1, betas=[0.9, 0.95], eps=1e-8, clip_grad=0.5)


def small_updates(directory: str, tp: int, pp: int, data: Minibatch, num_steps: int) -> tuple[float, float | None]:
    """How far all float32 weights moved (root of the sum of squares), and, on whole models, their distance from plain AdamW's."""
    groups = world_groups(tp, pp)
    model = load(directory, groups, dtype="bfloat16")
    start = {name: p.detach().float() for name, p in model.named_parameters()}
    trained = TrainedModel(model, SMALL, total_steps=num_steps)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(buffer.grad_data.dtype == torch.float32 for ddp in trained.ddp for buffer in ddp.buffers)
    for _ in range(num_steps):
        trained.step(data.share(groups).pack(), loss_of(model, data.num_tokens))
    squares = torch.zeros(1, dtype=torch.float64)
    masters = list(_masters(trained))
    for name, where, master in masters:
        assert master.dtype == torch.float32
        copies = 1 if getattr(model.get_parameter(name), "tensor_model_parallel", False) else tp
        squares += (master - start[name].flatten()[where]).double().square().sum() / copies
    dist.all_reduce(squares)
    if tp * pp > 1:
        return float(squares.sqrt()), None
    expected = plain_adamw(load(directory, groups, dtype="bfloat16"), data, num_steps)
    apart = sum(float((master - expected[name].flatten()[where]).square().sum()) for name, where, master in masters)
    way = sum(float((expected[name] - start[name]).flatten()[where].square().sum()) for name, where, _ in masters)
    return float(squares.sqrt()), math.sqrt(apart / way)


def _masters(trained: TrainedModel) -> Iterator[tuple[str, slice, Tensor]]:
    """Name, range (of the flat parameter) and values of every float32 weight that this rank's optimizer keeps."""
    for name, param in trained.model.named_parameters():
        master = getattr(param, "main_param", None)
        if master is None:
            continue  # another replica's share
        where = slice(0, param.numel())
        if getattr(param, "main_param_sharded", False):
            (optimizer,) = trained.optimizer.chained_optimizers
            found = optimizer._get_model_param_range_map(param)["param"]
            where = slice(found.start, found.end)
        yield name, where, master.detach().flatten()


def plain_adamw(model: RoleModel, data: Minibatch, num_steps: int) -> dict[str, Tensor]:
    """torch's AdamW on float32 weights, whose roundings compute; gradients of the micro-batches are added up in float32."""
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    adam = _adamw(list(masters.values()))
    for _ in range(num_steps):
        gradients = _gradients(model, data)
        for name, master in masters.items():
            master.grad = gradients[name]
        torch.nn.utils.clip_grad_norm_(masters.values(), SMALL.clip_grad)
        adam.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    return masters


def _adamw(params: list[Tensor]) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": SMALL.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=SMALL.lr, betas=tuple(SMALL.betas), eps=SMALL.eps)


def _gradients(model: RoleModel, data: Minibatch) -> dict[str, Tensor]:
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    loss = loss_of(model, data.num_tokens)
    model.train()
    for batch in data.pack():
        model.zero_grad(set_to_none=True)
        output = model(batch.tokens_T, PackedPlan(batch.lengths, model.rope), batch.rows_R)
        loss(batch, output)[0].backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            total[name] += param.grad.float()
    model.eval()
    return total


def forwards(directory: str, probes: list[list[int]]) -> dict[str, Tensor]:
    """Log-probs [T, V] of every token by the call that decodes and by the forward of training, in bfloat16, and exact ones."""
    groups = world_groups(1, 1)
    half, exact = (load(directory, groups, dtype=dtype) for dtype in ("bfloat16", "float32"))
    with torch.no_grad():
        for param, rounded in zip(exact.parameters(), half.parameters(), strict=True):
            param.copy_(rounded)
    found: dict[str, Any] = {
        "decode": cached_outputs(half, probes),
        "training": full_outputs([half], probes),
        "exact": full_outputs([exact], probes),
    }
    return {name: logits.float().log_softmax(-1) for name, logits in found.items()}


def rows_computed(directory: str, probes: list[list[int]]) -> dict[str, set[int]]:
    """Rows of the products of a layer and of the output layer in forwards over whole sequences, by dtype."""
    groups, seen = world_groups(1, 1), {}
    for dtype in ("bfloat16", "float32"):
        model = load(directory, groups, dtype=dtype)
        rows = seen[dtype] = set()
        for module in (model.decoder.layers[0].mlp.linear_fc1, model.output_layer):
            module.register_forward_pre_hook(lambda _, args, rows=rows: rows.add(len(args[0])))
        for probe in probes:
            assert len(full_outputs([model], [probe])) == len(probe)
    return seen
