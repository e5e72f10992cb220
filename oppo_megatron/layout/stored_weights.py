"""Compare a checkpoint's tensors with its `config.json`: none missing, none ignored unnoticed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.layout.hf_layout import EMBEDDING, LM_HEAD, PEFT, SCALAR_HEAD, Head, adapter_parts, hf_tensors
from oppo_megatron.layout.shape import ModelShape

FLOATS = ("F64", "F32", "F16", "BF16")
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Rotary tables of older checkpoints, which follow from `config.json`. `lm_head.weight` is also unread under a scalar head or
if tied.
"""
SHOWN = 8
WHOLE = "Use the config.json that belongs to these weights."
UNKNOWN = {
    r"^base_model\.|\.lora_|\.base_layer\.": "It is of adapters that were not merged: save the model after peft's "
    "merge_and_unload, or name the base as checkpoint and the adapters as lora.adapter.",
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|\w*quant_map|\w*absmax|quant_state.*|weight_(scale|packed|shape|zero_point)\w*|"
    r"\w+_scale|\w+_zero_point)$": "It belongs to quantised weights: use the checkpoint that is not quantised.",
    r"(^|\.)(v_head|value_head)\.": f"It is of a value head, which is read under the name {SCALAR_HEAD} only: remove it from the "
    "file, by loading the model with transformers and save_pretrained.",
    r"\.bias$": "Only biases of Qwen2's queries, keys and values are computed: use a model without others.",
    "": WHOLE,
}
"""Remedies for unexpected tensors; the first match counts."""


class Tensor(NamedTuple):
    """`dtype`: a code of safetensors."""

    shape: tuple[int, ...]
    dtype: str


def weight_problems(shape: ModelShape, head: Head, stored: Mapping[str, Tensor], equal: Callable[[str, str], bool]) -> list[str]:
    """A sentence per missing, misshapen or unexpected tensor. `equal` compares content; the rest needs headers only."""
    expected = hf_tensors(shape, head)
    if head == "lm" and SCALAR_HEAD in stored:
        return [f"{SCALAR_HEAD} makes this a *ForSequenceClassification. An actor or reference needs a *ForCausalLM."]
    problems = [problem for name, size in expected.items() for problem in _misfit(name, size, stored)]
    if head == "lm" and shape.tied_embeddings and LM_HEAD in stored and EMBEDDING in stored:
        if stored[LM_HEAD].shape != stored[EMBEDDING].shape or not equal(LM_HEAD, EMBEDDING):
            problems.append(
                f"{LM_HEAD} differs from {EMBEDDING}, but tie_word_embeddings of config.json is true. Transformers uses both: "
                "set tie_word_embeddings to false, or remove the tensor if the model shares the embeddings."
            )
    read = {*expected, LM_HEAD} if head == "scalar" or shape.tied_embeddings else set(expected)
    for name in sorted(stored.keys() - read):
        if not IGNORED.search(name):
            remedy = next(remedy for pattern, remedy in UNKNOWN.items() if re.search(pattern, name))
            problems.append(f"{name} has no place in the model of config.json. {remedy}")
    return problems


def adapter_problems(shape: ModelShape, lora: LoraConfig, head: Head, stored: Mapping[str, Tensor]) -> list[str]:
    """`weight_problems` of a peft directory; a scalar head may be missing."""
    due = {part.hf_name: part.hf_shape for part in adapter_parts(shape, lora, head)}
    optional = {f"{PEFT}{SCALAR_HEAD}"} - stored.keys()
    problems = [f"{name} is not one of the adapters' tensors" for name in sorted(stored.keys() - due.keys())]
    own = "the model and its rank ask", "Use the adapters of this model and this rank."
    return [problem for name in due if name not in optional for problem in _misfit(name, due[name], stored, *own)] + problems


def summary(problems: list[str]) -> str:
    more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "\n".join(f"  - {problem}" for problem in problems[:SHOWN] + more)


def nearest(name: str, names: Collection[str]) -> str:
    if near := difflib.get_close_matches(name, names, n=3):
        return f" Nearest names: {', '.join(near)}."
    return " Use a checkpoint that this model family's transformers class saved."


def _misfit(
    name: str, size: tuple[int, ...], stored: Mapping[str, Tensor], who: str = "config.json asks", remedy: str = WHOLE
) -> list[str]:
    if name not in stored and name == SCALAR_HEAD:
        return [
            f"{SCALAR_HEAD} is missing: this is not a *ForSequenceClassification. Give one, as `oppo rm` "
            "trains it, or start a new scalar head on this causal LM by `oppo convert --fresh-head-seed N`."
        ]
    if name not in stored:
        return [f"{name} is missing.{nearest(name, stored)}"]
    if stored[name].shape != size:
        one_label = "A reward or value head has one label: train or export the checkpoint with num_labels 1."
        remedy = one_label if name == SCALAR_HEAD else remedy
        return [f"{name} has shape {list(stored[name].shape)}, {who} for {list(size)}. {remedy}"]
    if stored[name].dtype not in FLOATS:
        return [f"{name} is not stored as one of {sorted(FLOATS)}. Use the checkpoint that is not quantised."]
    return []
