"""Tiny models on disk, written once."""

from pathlib import Path

import pytest

from tests.gloo.models import LLAMA3, save_small
from tests.support.hf import CAPS, PHI_SHORT


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of each model: biases (Qwen2), q/k norms (Qwen3), scaled rotations (Llama), windows, experts, scalar heads, and the
    particulars of Phi-3, OLMo 2, Gemma and GPT-OSS."""
    root: Path = tmp_path_factory.mktemp("models")
    save_small(root / "qwen2", "qwen2", tie_word_embeddings=True)
    save_small(root / "qwen3", "qwen3")
    save_small(root / "llama", "llama", rope_parameters=LLAMA3)
    save_small(root / "mistral", "mistral", sliding_window=5, seed=1)
    save_small(root / "mixtral", "mixtral", sliding_window=5)
    save_small(root / "phi3", "phi3", sliding_window=5, **PHI_SHORT)
    save_small(root / "olmo2", "olmo2")
    save_small(root / "gemma2", "gemma2", sliding_window=5, **CAPS)
    save_small(root / "gemma3", "gemma3_text", sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=12)
    # At the limit the gradient jumps: after updates, with 1.0, a number lies on the other side of it than in transformers.
    save_small(root / "gpt-oss", "gpt_oss", sliding_window=5, swiglu_limit=1.5)
    save_small(root / "olmo2-scalar", "olmo2", "scalar", seed=1)
    save_small(root / "qwen3-moe", "qwen3_moe")
    save_small(root / "qwen3-moe-scalar", "qwen3_moe", "scalar")
    save_small(root / "qwen2-scalar", "qwen2", "scalar")
    save_small(root / "qwen3-scalar", "qwen3", "scalar", seed=1)
    return {path.name: str(path) for path in root.iterdir()}
