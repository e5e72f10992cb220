"""The gated feed-forward's activation against megatron's composition of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.mcore.layers import swiglu


def composed(gate_up: Tensor) -> Tensor:
    gate, up = torch.chunk(gate_up, 2, dim=-1)
    return F.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 1, 48), (5, 3, 64), (0, 1, 16)])
def test_output_and_gradient_are_the_same_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    gate_up = (5 * torch.randn(shape)).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    (out, found), (expected_out, expected) = (
        (out, *torch.autograd.grad(out, gate_up, grad)) for out in (swiglu(gate_up), composed(gate_up))
    )
    assert out.dtype == found.dtype == dtype
    assert torch.equal(out, expected_out)
    assert torch.equal(found, expected)


def test_the_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


def test_gate_and_up_alone_are_kept() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gate_up = torch.randn(4, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        swiglu(gate_up)
    assert [tensor.data_ptr() for tensor in kept] == [gate_up.data_ptr()]
