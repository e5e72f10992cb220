"""Counted operations and bytes against torch's own counter on a real model, and against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.limit import forward_flops, training_flops
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.memory import stage_parameters
from oppo_megatron.layout.shape import causal_pairs, head_linear, layer_linears, weight_bytes
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.roles import load_role

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 80, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES = {"llama": LLAMA, "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}, "qwen3": QWEN3}
LENGTHS = [9, 5]


@pytest.fixture(scope="module")
def groups() -> Iterator[RoleGroups]:
    with open_world(RuntimeConfig(device="cpu").with_threads(1), environment={}):
        built = build_groups([0], 1, 1, "flops")
        assert built is not None
        yield built


def load(shape: dict[str, Any], groups: RoleGroups, head: Head) -> RoleModel:
    """Call megatron's modules: torch's counter does not know the products of weights laid out for the CPU."""
    role = ModelConfig(init=shape)
    return load_role(role, groups, head=head, max_length=64, device=torch.device("cpu"), path="module")


def counted(call: Any) -> int:
    """Count by torch's counter, which knows attention only as plain products and computes masked pairs too."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_forward_and_training_are_what_torch_counts(family: str, head: Head, groups: RoleGroups) -> None:
    shape, model = SHAPES[family], load(SHAPES[family], groups, head)
    tokens_T, rows_R = torch.arange(sum(LENGTHS)), torch.tensor([3, 4, 13])
    full_pairs = sum(length**2 for length in LENGTHS)
    expected = (shape, sum(LENGTHS), full_pairs, len(rows_R))

    def forward() -> torch.Tensor:
        return model(tokens_T, PackedPlan(LENGTHS, model.rope), rows_R)

    with torch.no_grad():
        assert counted(forward) == forward_flops(*expected, scalar=head == "scalar")
    model.requires_grad_(True)
    assert counted(lambda: forward().sum().backward()) == training_flops(*expected, scalar=head == "scalar")


def test_a_decode_step_is_what_torch_counts(groups: RoleGroups) -> None:
    model = load(LLAMA, groups, "lm").requires_grad_(False)
    cache = model.new_cache(3)
    for seq_id in range(3):
        cache.open(seq_id)
    step(model, cache, [0, 1, 2], [7, 7, 7], torch.arange(21))
    # All sequences are as long, so that nothing is masked: each token attends to 8 positions.
    plan = cache.begin([0, 1, 2], [1, 1, 1])
    with torch.no_grad():  # torch counts nothing in inference mode, in which `step` runs
        found = counted(lambda: model(torch.arange(3), plan))
    assert found == forward_flops(LLAMA, 3, 3 * causal_pairs(7, 1), 3, scalar=False)


@pytest.mark.parametrize(("past", "new"), [(0, 1), (0, 6), (5, 1), (4, 3)])
def test_pairs_are_those_of_the_causal_mask(past: int, new: int) -> None:
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(diagonal=past)
    assert causal_pairs(past, new) == int(mask.sum())


@pytest.mark.parametrize("family", SHAPES)
def test_matrices_are_the_models_parameters_but_for_the_small_ones(family: str, groups: RoleGroups) -> None:
    shape, model = SHAPES[family], load(SHAPES[family], groups, "lm")
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "word_embeddings" not in name]
    head = head_linear(shape, scalar=False).size if shape["tie_word_embeddings"] else 0
    assert weight_bytes(shape, "float32", scalar=False) == 4 * (sum(p.numel() for p in matrices) + head)
    in_layers = 3 * sum(linear.size for linear in layer_linears(shape))
    assert in_layers < stage_parameters(shape, 1, 1, 0, scalar=False)
    assert weight_bytes(shape, "bfloat16", scalar=True) == 2 * (in_layers + 32)
