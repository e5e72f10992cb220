"""Decode speed of transformers' `generate` on a CUDA device, to compare with the decode seconds of our runs there.

Legend: B sequences, P prompt tokens, N new tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from oppo_megatron.errors import ConfigError


def require_cuda() -> None:
    """Raise ConfigError if torch finds no CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--hf-generate measures on a CUDA device, and torch {torch.__version__} finds none here; run it on a machine "
            "with a GPU and a CUDA build of torch (on a CPU, `oppo bench decode` has `hf` among its peers)"
        )


def measure_generate(
    directory: Path, batch: int, prompt_tokens: int, new_tokens: int, dtype: str, repeats: int, device: str = "cuda"
) -> dict[str, Any]:
    """Tokens/s of sampling at temperature 1 in a batch without a row that ends early, the prefill taken off.

    A first call warms up; then the median of `repeats` calls of N + 1 tokens, less the median of as many calls of one token.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
    model = model.to(device).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    generator = torch.Generator().manual_seed(batch)
    prompts_BP = torch.randint(model.config.vocab_size, (batch, prompt_tokens), generator=generator).to(device)

    def seconds(count: int) -> float:
        _wait(device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompts_BP, attention_mask=torch.ones_like(prompts_BP), max_new_tokens=count, min_new_tokens=count,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            )  # fmt: skip
        _wait(device)
        assert output.shape[1] == prompt_tokens + count, output.shape
        return time.perf_counter() - started

    seconds(new_tokens + 1)
    prefill = median(seconds(1) for _ in range(repeats))
    rates = sorted(batch * new_tokens / (seconds(new_tokens + 1) - prefill) for _ in range(repeats))
    work = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "dtype": dtype, "device": device}
    return {**work, "prefill_s": prefill, "tokens_per_s": median(rates), "min": rates[0], "max": rates[-1]}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
