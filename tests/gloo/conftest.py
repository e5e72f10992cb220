"""Tiny models on disk, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def save_small(directory: Path, family: str, head: str = "lm", **changes: Any) -> None:
    """Weights of a size that keeps logits near 1, so that a tolerance of 1e-5 is about arithmetic and not about scale."""
    model = tiny_model(family, head, **changes)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(0.6)
    model.save_pretrained(directory)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of each model: Qwen2 (biases), Qwen3 (q/k norms), Llama (scaled rotations), Mistral (a window), and scalar heads."""
    root: Path = tmp_path_factory.mktemp("models")
    save_small(root / "qwen2", "qwen2", tie_word_embeddings=True)
    save_small(root / "qwen3", "qwen3")
    save_small(root / "llama", "llama", rope_parameters=LLAMA3)
    save_small(root / "mistral", "mistral", sliding_window=5, seed=1)
    save_small(root / "qwen2-scalar", "qwen2", "scalar")
    save_small(root / "qwen3-scalar", "qwen3", "scalar", seed=1)
    return {path.name: str(path) for path in root.iterdir()}


LAYOUTS = [(1, 1), (2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.long)]


@pytest.fixture(params=LAYOUTS, ids=["tp1-pp1", "tp2-pp1", "tp1-pp2", "tp2-pp2"])
def layout(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param
