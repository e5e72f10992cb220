"""Outputs in bfloat16 are those of transformers' bfloat16 model, and no further from exact ones than those are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.test_hf_logits import LAYOUTS, ragged_sequences
from tests.support.hf import tiny_model
from tests.support.ranks import run_ranks

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Numbers of the order of real models': sums of a few dozen terms would round alike by luck, or far apart by bad luck."""

CASES = [("qwen2", "lm"), ("qwen3", "lm"), ("llama", "lm"), ("qwen2", "scalar")]


def outputs(model: Any, head: str, sequences: list[list[int]]) -> Tensor:
    """transformers' logits [T, V], or the scalar head's value [T] at every token, in the model's own type."""
    inputs = [torch.tensor([tokens]) for tokens in sequences]
    with torch.no_grad():
        if head == "lm":
            return torch.cat([model(tokens).logits[0] for tokens in inputs]).float()
        return torch.cat([model.score(model.model(tokens).last_hidden_state)[0, :, 0] for tokens in inputs]).float()


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Tensor, Tensor]:
    family, head = request.param
    model, sequences = tiny_model(family, head, **WIDE), ragged_sequences()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(0.2)  # logits near 1
    model.bfloat16()
    directory = tmp_path_factory.mktemp("bfloat16")
    model.save_pretrained(directory)
    half = outputs(model, head, sequences)
    return directory, head, half, outputs(model.float(), head, sequences)


@pytest.mark.parametrize("tp,pp", LAYOUTS)
def test_outputs_are_those_of_transformers(saved: tuple[Path, str, Tensor, Tensor], tp: int, pp: int) -> None:
    directory, head, half, exact = saved
    job = {"src": str(directory), "tp": tp, "pp": pp, "head": head, "sequences": ragged_sequences(), "dtype": "bfloat16"}
    (ours,) = [x for x in run_ranks(tp * pp, "tests.parity.weight_jobs:full_logits", **job) if x is not None]
    spread = float(exact.std())
    assert ours.shape == exact.shape and spread > 0.5
    assert ours.dtype == (torch.bfloat16 if head == "lm" else torch.float32)
    ours = ours.float()
    assert rms(ours - half) < 0.03 * spread
    assert float((ours - half).abs().max()) < 0.15 * spread
    assert 0 < rms(ours - exact) < 1.1 * rms(half - exact)
