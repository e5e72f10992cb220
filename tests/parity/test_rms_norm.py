"""Norm and gradients on a CPU against torch's own composition of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oppo_megatron.mcore.layers import fixed_norm, rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("shape", [(1, 8), (7, 1, 48), (5, 3, 64), (0, 1, 16)])
def test_output_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(len(shape))
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    weight = torch.rand(shape[-1]).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    outputs = [norm(x) for norm in (lambda x: rms_norm(x, weight, 1e-5), lambda x: F.rms_norm(x, shape[-1:], weight, 1e-5))]
    found, expected = ([out, *torch.autograd.grad(out, (x, weight), grad)] for out in outputs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    fixed = fixed_norm(weight.detach(), 1e-5)(x.detach())
    assert fixed.dtype == dtype
    torch.testing.assert_close(fixed, expected[0], rtol=tolerance, atol=tolerance)


def test_a_row_of_zeros_has_a_finite_gradient_and_frozen_weights_have_none() -> None:
    x, weight = torch.zeros(2, 16, requires_grad=True), torch.ones(16)
    out = rms_norm(x, weight, 1e-6)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.abs().amax() == 0
    torch.testing.assert_close(grad, torch.full((2, 16), 1e3))  # 1 / sqrt(eps)
