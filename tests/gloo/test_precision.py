"""bfloat16 computes, float32 remembers: small updates add up, and decoding rounds as training does."""

import math
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.config.model import OptimizerConfig
from oppo_megatron.layout.memory import WHOLE_MULTIPLE, training_kernel_bytes
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.batch import pack_responses
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import TrainedModel, forward_rows
from tests.gloo.jobs_training import Minibatch, cached_outputs, full_outputs, loss_of
from tests.gloo.models import CPU, MAX_LENGTH, load, save_small, world_groups
from tests.gloo.test_training import DATA
from tests.support.hf import tiny_model
from tests.support.ranks import run_ranks

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
        rounded = model.get_parameter(name).detach().flatten()[where]
        assert master.dtype == torch.float32 and torch.equal(rounded, master.to(torch.bfloat16)), "what decodes is the master"
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
    groups = [{"params": [p for p in masters.values() if (p.ndim > 1) == d], "weight_decay": 0.1 * d} for d in (True, False)]
    adam = torch.optim.AdamW(groups, lr=SMALL.lr, betas=tuple(SMALL.betas), eps=SMALL.eps)
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


def _gradients(model: RoleModel, data: Minibatch) -> dict[str, Tensor]:
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    loss = loss_of(model, data.num_tokens)
    model.train()
    for batch in data.pack():
        model.zero_grad(set_to_none=True)
        hidden_RH = model(batch.tokens_T, PackedPlan(batch.lengths, model.rope, batch.prefixes), batch.rows_R)
        loss(batch, model.output_rows(hidden_RH))[0].backward()
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
        "decode": cached_outputs(half, probes), "training": full_outputs([half], probes), "exact": full_outputs([exact], probes),
    }  # fmt: skip
    return {name: logits.float().log_softmax(-1) for name, logits in found.items()}


def rows_computed(directory: str, probes: list[list[int]]) -> dict[str, set[int]]:
    """Rows of the products of a layer and of the output layer in forwards over whole sequences, by dtype."""
    groups, seen = world_groups(1, 1), {}
    for dtype in ("bfloat16", "float32"):
        model = load(directory, groups, dtype=dtype)
        rows = seen[dtype] = set()
        model.decoder.layers[0].mlp.linear_fc1.register_forward_pre_hook(lambda _, args, rows=rows: rows.add(len(args[0])))
        for batch in (batch for probe in probes for batch in pack_responses([probe[:1]], [[*probe[1:], 1]], MAX_LENGTH, CPU)):
            with mock.patch.object(F, "linear", side_effect=F.linear) as products:
                forward_rows(model, [batch], lambda b, out: out.by_rows(lambda _, found_B: found_B, b.targets_R))
                forward_rows(model, [batch], lambda b, out: out.figures(b.targets_R).logp_R)
            assert products.call_count >= 2
            rows.update(len(call.args[0]) for call in products.call_args_list)
    return seen


NUM_STEPS = 25
JOBS = "tests.gloo.test_precision:"
MINIBATCH = DATA[1]
LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 1, 2)]


@cache
def distance_in_one_process(directory: str) -> float:
    job = {"directory": directory, "data": MINIBATCH, "num_steps": NUM_STEPS}
    ((moved, _),) = run_ranks(1, f"{JOBS}small_updates", tp=1, pp=1, **job)
    return float(moved)


@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [pytest.param(*layout, marks=[] if layout == LAYOUTS[1] else [pytest.mark.long]) for layout in LAYOUTS]
)
def test_updates_of_a_ten_thousandth_add_up(models: dict[str, str], tp: int, pp: int, dp: int) -> None:
    """Equals plain AdamW on float32 weights, number by number where a rank's shares are comparable; else as far in all."""
    job = {"directory": models["qwen3"], "data": MINIBATCH, "num_steps": NUM_STEPS}
    moved = distance_in_one_process(models["qwen3"])
    for distance, apart in run_ranks(tp * pp * dp, f"{JOBS}small_updates", tp=tp, pp=pp, **job):
        assert distance == pytest.approx(moved, rel=0.003) and (apart is None) == (tp * pp > 1)
        assert apart is None or apart < 0.02


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_decoding_rounds_as_training_does(tmp_path: Path) -> None:
    """Biases are added before the product is rounded in both: else the gap would be as large as bfloat16's own error."""
    save_small(tmp_path, "qwen2", hidden_size=32)
    assert tiny_model("qwen2").model.layers[0].self_attn.q_proj.bias.abs().max() > 0.1
    dice = random.Random(2)
    probes = [[dice.randrange(1, 64) for _ in range(length)] for length in (32, 20, 7)]
    (found,) = run_ranks(1, f"{JOBS}forwards", directory=str(tmp_path), probes=probes)
    error = rms(found["training"] - found["exact"])
    assert rms(found["decode"] - found["training"]) < 0.5 * error
    assert rms(found["decode"] - found["exact"]) < 1.2 * error


def test_whole_sequences_in_bfloat16_come_in_few_sizes(tmp_path: Path) -> None:
    """The library makes, and keeps, kernels for each size; their plan counts so many."""
    save_small(tmp_path, "qwen2", hidden_size=32)
    probes = [list(range(1, 1 + length)) for length in (3, 20, 31)]
    (seen,) = run_ranks(1, f"{JOBS}rows_computed", directory=str(tmp_path), probes=probes)
    assert seen == {"bfloat16": {WHOLE_MULTIPLE}, "float32": {3, 20, 31}}
    assert training_kernel_bytes(65) == 2 * training_kernel_bytes(WHOLE_MULTIPLE) == 2 * 18 * 2**20
