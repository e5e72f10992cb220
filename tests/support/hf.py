"""Tiny random Hugging Face models, saved as a user would have them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5, 2.5], "long_factor": [2.0, 5.0],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Rotations of Phi-3, of half of a head of 8 numbers; changed beyond 16 tokens, or 64."""
PHI_LONG, PHI_SHORT = (
    {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LONG | of_length} | of_length
    for of_length in ({"original_max_position_embeddings": n} for n in (16, 64))
)
OSS = {
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 1.0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32}}  # fmt: skip
"""A limit that clamps some numbers of random experts."""
CAPS = {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def tiny_config(family: str, **changes: Any) -> Any:
    """Qwen3's head dim is set apart from hidden / heads, as its checkpoints have it."""
    own: dict[str, Any] = {
        "phi3": {"eos_token_id": 2}, "gemma2": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}, "qwen3": {"head_dim": 16},
        "mixtral": {"num_local_experts": 6}, "gpt_oss": OSS,
        "qwen3_moe": {
            "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "norm_topk_prob": True
        },
    }  # fmt: skip
    sizes = {**SIZES, **own.get(family, {}), **changes}
    return AutoConfig.for_model(family, **sizes)


def tiny_model(family: str, head: str = "lm", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Every parameter random, norms and biases too, so that a swapped or forgotten one shows."""
    config = tiny_config(family, **changes)
    if head == "scalar":
        config.num_labels = 1
    loader = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = loader.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            centre = float(not family.startswith("gemma"))  # of norms' weights
            param.copy_(centre + 0.1 * noise if "norm" in name else 0.3 * noise)
    return model


def save_tiny(directory: Path, family: str, head: str = "lm", *, max_shard_size: str = "5GB", **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, head, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def convert(*arguments: object) -> int:
    """The exit code of `oppo convert`."""
    from oppo_megatron.cli.main import main

    return main(["convert", *map(str, arguments)])
