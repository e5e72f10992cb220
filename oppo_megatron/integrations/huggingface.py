"""Hugging Face directories, rewritten and compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.runtime.mcore.hf_layout import Head
from oppo_megatron.runtime.mcore.hf_source import FreshHead, open_weights, side_files
from oppo_megatron.runtime.mcore.hf_weights import rewrite_weights


def convert(
    src: Path, dst: Path, head: Head, dtype: str | None, fresh_head_seed: int | None, max_shard_bytes: int
) -> int:
    """Write `src` anew at `dst` with another dtype, head or shard size; returns the number of tensors.

    Raises CheckpointError if `src` cannot be read as what `dst` is to be, or `dst` is not empty.
    """
    fresh = fresh_head_seed is not None
    if fresh and head == "lm":
        raise ConfigError(
            "--fresh-head-seed draws a scalar head, which a causal-lm lacks. Add --as reward or drop the flag."
        )
    shape, source = open_weights(ModelConfig(checkpoint=src, fresh_head=fresh, init_seed=fresh_head_seed or 0), head)
    if fresh and not isinstance(source, FreshHead):
        raise CheckpointError(f"{src} has a scalar head already, which is kept. Drop --fresh-head-seed.")
    rewrite_weights(
        shape,
        source,
        dst,
        head=head,
        dtype=getattr(torch, dtype) if dtype else None,
        max_shard_bytes=max_shard_bytes,
        extra_files=side_files(src),
    )
    return len(source.names())


def compare_outputs(src: Path, dst: Path, head: str, fresh_head: bool, num_tokens: int = 32) -> tuple[str, float]:
    """What was compared, and its largest absolute difference on random tokens, computed by transformers in float32.

    Logits (or scores); the last hidden states where SRC has no head to compare with.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    if fresh_head:
        loader, what = AutoModel, "hidden states"
    else:
        loader, what = (AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification), "logits"

    def outputs(directory: Path) -> torch.Tensor:
        model = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator)
        with torch.no_grad():
            result = model(tokens)
        return result.last_hidden_state if fresh_head else result.logits

    return what, float((outputs(src) - outputs(dst)).abs().max())


def write_random_checkpoint(
    hf_config: Mapping[str, Any], directory: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """A causal LM of a `config.json` with random weights, which are drawn on the device: on a GPU in seconds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(directory)
