"""Convert and compare Hugging Face and Megatron checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.hf_layout import Head, hf_tensors
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.dist_writer import ALIGNER, CONFIG_NAME, MEGATRON, nemo_config, write_dist
from oppo_megatron.mcore.weights.hf_source import FreshHead, TensorSource, open_weights, side_files
from oppo_megatron.mcore.weights.hf_weights import common_dtype, has_head, merged, rewrite_weights
from oppo_megatron.mcore.weights.hf_writer import MAX_SHARD_BYTES, hf_config, require_empty, whole_directory
from oppo_megatron.modeldir.adapters import lora_of
from oppo_megatron.modeldir.megatron import NEMO_WEIGHTS

Target = Literal["hf", "megatron", "nemo"]
COMPARED_TOKENS = 32


@dataclass(frozen=True)
class Conversion:
    head: Head
    to: Target = "hf"
    dtype: str | None = None  # None: the narrowest that keeps every bit
    fresh_head_seed: int | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES  # of hf
    shape_file: Path | None = None  # the `config.json` of a Megatron checkpoint that has none
    adapter: Path | None = None  # a peft directory to merge


SideFiles = Callable[[str, Sequence[Path]], tuple[Sequence[Path], Mapping[str, Any]]]
"""Maps a model's family and side files to the files for the new checkpoint and ids for its `config.json`."""


def convert(src: Path, dst: Path, what: Conversion, side: SideFiles | None = None) -> int:
    """Convert `src` to `dst`; return the number of tensors.  `side` None: copy tokenizer and generation settings.

    Raises CheckpointError if `src` is unreadable or `dst` is not empty, ConfigError for conflicting options.
    """
    dst = dst.resolve()  # `.` has no name, and a link must not be replaced itself
    require_empty(dst)
    shape, source = _open_source(src, what)
    files, ids = (side_files(src), {}) if side is None else side(shape.family, side_files(src))
    shape = replace(shape, hf={**shape.hf, **ids})
    dtype = getattr(torch, what.dtype) if what.dtype else common_dtype(shape, source, what.head)
    if what.to == "hf":
        rewrite_weights(shape, source, dst, head=what.head, dtype=dtype, max_shard_bytes=what.max_shard_bytes, extra_files=files)
        return len(hf_tensors(shape, what.head))
    nemo = what.to == "nemo"
    # NeMo names the tokenizer by its path: DST, which has the tokenizer files next to the weights.
    texts = {CONFIG_NAME: yaml.safe_dump(nemo_config(shape, what.head, str(dst)), sort_keys=False)} if nemo else {}
    texts["config.json"] = json.dumps(hf_config(shape, what.head, dtype), indent=2) + "\n"
    with whole_directory(dst, files) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        weights, naming = (folder / NEMO_WEIGHTS, ALIGNER) if nemo else (folder, MEGATRON)
        return write_dist(shape, source, weights, head=what.head, dtype=dtype, naming=naming)


def _open_source(src: Path, what: Conversion) -> tuple[ModelShape, TensorSource]:
    fresh = what.fresh_head_seed is not None
    if fresh and what.head == "lm":
        raise ConfigError("--fresh-head-seed draws a scalar head, which a causal-lm lacks. Add --as reward or drop the flag.")
    adapters = None if what.adapter is None else lora_of(what.adapter)
    brought = what.head == "scalar" and what.adapter is not None and has_head(what.adapter)
    shape, source = open_weights(
        ModelConfig(checkpoint=src), what.head, what.shape_file, seed=what.fresh_head_seed or 0, fresh_head=fresh or brought
    )
    if fresh and not isinstance(source, FreshHead):
        raise CheckpointError(f"{src} has a scalar head already, which is kept. Drop --fresh-head-seed.")
    if adapters is not None:
        source = merged(source, shape, what.head, adapters)
    return shape, source


def compare_outputs(src: Path, dst: Path, head: str, fresh_head: bool) -> tuple[str, float]:
    """Return quantity and its largest difference on random tokens, in float32."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    if fresh_head:
        loader, what = AutoModel, "hidden states"
    else:
        loader, what = (AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification), "logits"

    def outputs(directory: Path) -> torch.Tensor:
        model = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (1, COMPARED_TOKENS), generator=generator)
        with torch.no_grad():
            result = model(tokens)
        return result.last_hidden_state if fresh_head else result.logits

    return what, float((outputs(src) - outputs(dst)).abs().max())


def compare_weights(src: Path, dst: Path, what: Conversion) -> tuple[int, float]:
    """Return number of tensors and largest difference."""
    shape, source = _open_source(src, what)
    _, written = open_weights(ModelConfig(checkpoint=dst), what.head)
    tensors = hf_tensors(shape, what.head)

    def difference(name: str, size: tuple[int, ...]) -> float:
        whole = tuple(slice(0, length) for length in size)
        return float((source.read(name, whole).double() - written.read(name, whole).double()).abs().max())

    return len(tensors), max(difference(name, size) for name, size in tensors.items())


def write_random_checkpoint(hf_config: Mapping[str, Any], directory: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Draw weights on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(directory)
