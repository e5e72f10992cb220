"""Logits and scalar-head outputs equal those of Hugging Face transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf import SIZES, save_tiny
from tests.support.ranks import run_ranks

SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    **{f"llama-{kind}": ("llama", {"rope_parameters": rope}) for kind, rope in SCALED.items()},
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
TOLERANCE = 1e-4


def ragged_sequences(lengths: tuple[int, ...] = (50, 1, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def compare(directory: Path, hf: Any, head: str, tp: int, pp: int) -> None:
    sequences = ragged_sequences()
    answers = run_ranks(
        tp * pp, "tests.parity.weight_jobs:full_logits", src=str(directory), tp=tp, pp=pp, head=head, sequences=sequences
    )
    (ours,) = [answer for answer in answers if answer is not None]
    with torch.no_grad():
        if head == "lm":
            theirs = torch.cat([hf(torch.tensor([tokens])).logits[0] for tokens in sequences])
        else:  # the score of every prefix: a value head's outputs
            prefixes = [tokens[: n + 1] for tokens in sequences for n in range(len(tokens))]
            theirs = torch.cat([hf.score(hf.model(torch.tensor([p])).last_hidden_state)[0, -1] for p in prefixes])
            last = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
            whole = torch.cat([hf(torch.tensor([tokens])).logits[0] for tokens in sequences])
            assert (ours[last] - whole).abs().max() < TOLERANCE
    assert theirs.std() > 0.1 and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(tmp_path: Path, model: str) -> None:
    family, changes = MODELS[model]
    compare(tmp_path, save_tiny(tmp_path, family, **changes), "lm", 1, 1)


@pytest.mark.parametrize("tp,pp", LAYOUTS[1:])
@pytest.mark.parametrize("model", ["qwen2", "qwen2-tied", "qwen3", "llama-llama3"])
def test_logits_equal_transformers_on_every_layout(tmp_path: Path, model: str, tp: int, pp: int) -> None:
    family, changes = MODELS[model]
    compare(tmp_path, save_tiny(tmp_path, family, **changes), "lm", tp, pp)


@pytest.mark.parametrize("tp,pp", [(2, 1), (4, 1), (2, 2)])
def test_a_vocabulary_that_tensor_ranks_do_not_divide(tmp_path: Path, tp: int, pp: int) -> None:
    compare(tmp_path, save_tiny(tmp_path, "qwen2", vocab_size=259, tie_word_embeddings=tp == 2), "lm", tp, pp)


@pytest.mark.parametrize("window", [1, 8, 17, None])
def test_a_sliding_window_is_that_of_mistral(tmp_path: Path, window: int | None) -> None:
    compare(tmp_path, save_tiny(tmp_path, "mistral", sliding_window=window), "lm", 1, 1)


@pytest.mark.parametrize("tp,pp", LAYOUTS[1:])
def test_a_sliding_window_on_every_layout(tmp_path: Path, tp: int, pp: int) -> None:
    compare(tmp_path, save_tiny(tmp_path, "mistral", sliding_window=8, head_dim=16, vocab_size=65), "lm", tp, pp)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_sliding_window_in_some_layers(tmp_path: Path, family: str) -> None:
    some = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    compare(tmp_path, save_tiny(tmp_path, family, **some), "lm", 1, 2)


@pytest.mark.parametrize("tp,pp", LAYOUTS)
def test_scalar_head_equals_transformers_classifier(tmp_path: Path, tp: int, pp: int) -> None:
    hf = save_tiny(tmp_path, "qwen2", "scalar")
    compare(tmp_path, hf, "scalar", tp, pp)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_scalar_head_of_every_family(tmp_path: Path, family: str) -> None:
    window = {"sliding_window": 8} if family == "mistral" else {}
    compare(tmp_path, save_tiny(tmp_path, family, "scalar", **window), "scalar", 1, 1)
