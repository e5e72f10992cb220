"""Vocabulary-parallel log-probs, entropy and their gradients against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.layout.layouts import vocab_rows
from oppo_megatron.mcore.vocab import VocabShards, token_logprobs
from tests.gloo.models import gather_logits
from tests.support.ranks import run_ranks


def shards_of(vocab_size: int) -> VocabShards:
    return VocabShards(dist.group.WORLD, vocab_rows(vocab_size, dist.get_world_size()), vocab_size)


def shard_results(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, this shard's gradient of weights . (log-probs, entropies))."""
    vocab = shards_of(logits_RV.shape[-1])
    shard_RV = logits_RV.split(vocab.rows, dim=-1)[vocab.rank].clone().requires_grad_()
    before_RV = shard_RV.detach().clone()
    logprobs_R, entropy_R = token_logprobs(shard_RV, targets_R, vocab, temperature)
    (weights_2R * torch.stack([logprobs_R, entropy_R])).sum().backward()
    assert torch.equal(shard_RV, before_RV), "the logits are the caller's"
    assert torch.equal(gather_logits(before_RV, vocab), logits_RV)
    assert shard_RV.grad is not None
    return logprobs_R.detach(), entropy_R.detach(), shard_RV.grad


def many(cases: list[tuple[Tensor, Tensor, float, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [shard_results(*case) for case in cases]


def finite_differences(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor, step: float) -> Tensor:
    """Central differences of weights . (log-probs, entropies) by every logit of the whole vocabulary."""
    vocab = shards_of(logits_RV.shape[-1])

    def value(changed_RV: Tensor) -> Tensor:
        shard_RV = changed_RV.split(vocab.rows, dim=-1)[vocab.rank]
        both = torch.stack(token_logprobs(shard_RV, targets_R, vocab, temperature))
        return (weights_2R * both).double().sum()

    slopes = torch.zeros_like(logits_RV)
    for place in range(logits_RV.numel()):
        offset = torch.zeros(logits_RV.numel())
        offset[place] = step
        offset_RV = offset.view_as(logits_RV)
        slopes.view(-1)[place] = (value(logits_RV + offset_RV) - value(logits_RV - offset_RV)) / (2 * step)
    return slopes


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
    answers = run_ranks(tp, "tests.gloo.test_logprobs:many", cases=list(CASES.values()))
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
    answers = run_ranks(tp, "tests.gloo.test_logprobs:many", cases=[small])
    gradient = torch.cat([answer[0][2] for answer in answers], -1)
    keys = ("logits_RV", "targets_R", "temperature", "weights_2R")
    (slopes, *_) = run_ranks(tp, "tests.gloo.test_logprobs:finite_differences", **dict(zip(keys, small, strict=True)), step=0.02)
    assert slopes.abs().max() > 0.1
    assert (gradient - slopes).abs().max() < 2e-3
