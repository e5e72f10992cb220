"""Vocabulary-parallel log-probs, entropy and their gradients against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks

Case = tuple[Tensor, Tensor, float, Tensor]


def make_cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)

    def case(scale: float, temperature: float, rows: int = 6, vocab: int = 32) -> Case:
        logits = torch.randn(rows, vocab, generator=generator) * scale
        targets = torch.randint(vocab, (rows,), generator=generator)
        return logits, targets, temperature, torch.randn(2, rows, generator=generator)

    extreme = case(1.0, 1.0)
    extreme[0][0, 3], extreme[0][1, 17], extreme[0][2, :] = 1e4, -1e4, 5e3
    extreme[0][3, 5], extreme[1][3] = 300.0, 20  # the target is all but impossible
    return {"plain": case(2.0, 1.0), "cool": case(2.0, 0.5), "hot": case(1.0, 1.7), "extreme": extreme,
            "temperature 0 is 1": case(1.0, 0.0), "steep": case(40.0, 1.0),
            "tensor ranks have more rows than tokens": case(2.0, 0.7, vocab=30)}  # fmt: skip


CASES = make_cases()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_torch_in_float64(tp: int) -> None:
    answers = run_ranks(tp, "tests.gloo.jobs_logprobs:many", cases=list(CASES.values()))
    for place, (name, (logits, targets, temperature, weights)) in enumerate(CASES.items()):
        x = logits.double().requires_grad_()
        logq = torch.log_softmax(x / (temperature or 1.0), -1)
        logprobs = logq.gather(-1, targets[:, None])[:, 0]
        entropy = torch.special.entr(logq.exp()).sum(-1)
        # The gradient of q log q in closed form, which stays finite where q is 0.
        closed = -logq.detach().exp() * (logq.detach() + entropy.detach()[:, None])
        (weights[0].double() * logprobs).sum().backward()
        expected = x.grad + weights[1].double()[:, None] * closed / (temperature or 1.0)
        for answer in answers:
            found_logprobs, found_entropy, _ = answer[place]
            scale = 1 + logprobs.detach().abs()
            assert ((found_logprobs - logprobs.detach()).abs() / scale).max() < 3e-6, name
            assert (found_entropy - entropy.detach()).abs().max() < 2e-5, name
            assert torch.equal(found_logprobs, answers[0][place][0]), "equal on every tensor rank"
        gradient = torch.cat([answer[place][2] for answer in answers], -1)
        assert torch.isfinite(gradient).all() and (gradient - expected).abs().max() < 2e-5, name


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_equal_finite_differences(tp: int) -> None:
    logits, targets, temperature, weights = CASES["cool"]
    small = (logits[:2, :6].contiguous(), targets[:2] % 6, temperature, weights[:, :2].contiguous())
    answers = run_ranks(tp, "tests.gloo.jobs_logprobs:many", cases=[small])
    gradient = torch.cat([answer[0][2] for answer in answers], -1)
    keys = ("logits_RV", "targets_R", "temperature", "weights_2R")
    (slopes, *_) = run_ranks(tp, "tests.gloo.jobs_logprobs:finite_differences", **dict(zip(keys, small, strict=True)), step=0.02)
    assert slopes.abs().max() > 0.1
    assert (gradient - slopes).abs().max() < 2e-3
