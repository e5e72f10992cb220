"""Checks that a model fits its layout, contexts and tokenizer, without reading weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oppo_megatron.config.model import HEADS_LEARNED
from oppo_megatron.layout.layouts import HasSizes, Limits, Sizes, divisors, fills_shards, suggestion, vocab_rows

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
POSITIVE = ("rms_norm_eps", "initializer_range")
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""Numbers required in addition to `rope_theta`."""
OPTIONAL_ROPE = ("factor", "original_max_position_embeddings")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOST_POSITIONS = 2**62  # bounds an absurd factor
DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
DEFAULT_WINDOW = 4096
ROWS_OF_SUMS = ("o_proj", "down_proj")
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_shape(
    name: str,
    hf_config: Mapping[str, Any],
    layout: HasSizes,
    max_context: int,
    tokenizer_vocab_size: int | None,
) -> list[str]:
    """Problems of a model in a layout, with its contexts and vocabulary."""
    sizes = Sizes.of(layout)
    own = check_use(name, hf_config, max_context, tokenizer_vocab_size)
    if check_model(name, hf_config):
        return own
    return own + check_divisions(name, hf_config, sizes, sizes.num_ranks, model_limits(hf_config))


def check_use(name: str, hf_config: Mapping[str, Any], max_context: int, tokenizer_vocab_size: int | None) -> list[str]:
    """`check_shape` without a layout."""
    problems = check_model(name, hf_config)
    if problems:
        return problems
    return [
        *_check_heads(name, hf_config),
        *_check_context(name, hf_config, max_context),
        *_check_vocabulary(name, hf_config, tokenizer_vocab_size),
    ]


def check_divisions(name: str, hf_config: Mapping[str, Any], sizes: Sizes, num_ranks: int, limits: Limits) -> list[str]:
    """Sizes that do not divide, with layouts that would fit `num_ranks`."""
    problems = []
    tp, pp, _, vpp = sizes
    heads, kv_heads, layers = hf_config["num_attention_heads"], num_kv_heads(hf_config), hf_config["num_hidden_layers"]
    ffn, vocab = hf_config["intermediate_size"], hf_config["vocab_size"]
    widths = ", ".join(map(str, divisors(limits.width)))
    for count, what in (
        (heads, f"{heads} attention heads do"),
        (kv_heads, f"{kv_heads} key/value heads do"),
        (ffn, f"intermediate_size {ffn} does"),
    ):
        if count % tp:
            problems.append(f"{name}: {what} not divide by tp {tp}; choose tp from {widths}")
    if not fills_shards(vocab, tp):
        problems.append(
            f"{name}: vocab_size {vocab} leaves a rank of tp {tp} without a token ({vocab_rows(vocab, tp)} a rank); lower tp"
        )
    fitting = ", ".join(map(str, divisors(layers)))
    if layers % pp:
        problems.append(f"{name}: {layers} layers do not divide by pp {pp}; choose pp from {fitting}")
    elif layers % (pp * vpp):
        problems.append(
            f"{name}: {layers} layers do not divide by pp {pp} x vpp {vpp} = {pp * vpp}; choose a pp x vpp from {fitting}"
        )
    near = suggestion(sizes, num_ranks, limits) if problems else ""
    return [problem + near for problem in problems]


def model_limits(hf_config: Mapping[str, Any], sequences: int | None = None, min_tp: int = 1) -> Limits:
    width = math.gcd(hf_config["num_attention_heads"], num_kv_heads(hf_config), hf_config["intermediate_size"])
    return Limits(width, hf_config["num_hidden_layers"], sequences, min_tp, hf_config["vocab_size"])


def check_model(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    """Errors and unsupported settings of a `config.json`."""
    family = hf_config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return [f"{name}: model_type {family!r} is not supported; use one of {', '.join(FAMILIES)} (Qwen2.5 is qwen2)"]
    numbers = _check_numbers(name, hf_config)
    windows = [] if numbers else _check_windows(name, hf_config)
    return [*_check_architecture(name, hf_config), *numbers, *windows, *_check_rope(name, hf_config)]


def check_head(name: str, hf_config: Mapping[str, Any], *, scalar: bool) -> list[str]:
    """Check the head of a role's checkpoint; a role whose head is learned may start with a new one."""
    architectures = hf_config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    classifier = architecture.endswith("ForSequenceClassification")
    if not scalar and classifier:
        return [f"{name}: its checkpoint is a {architecture} without a language-model head; use a *ForCausalLM checkpoint"]
    if scalar and not classifier and name not in HEADS_LEARNED:
        return [
            f"{name}: its checkpoint is a {architecture or 'model of unknown class'}, but a scalar head is needed; "
            "use a *ForSequenceClassification checkpoint, as `oppo rm` trains one (`weights/` of its run_dir): a frozen model's "
            "new head would score at random"
        ]
    names = hf_config.get("id2label")
    labels = hf_config.get("num_labels", len(names) if isinstance(names, (dict, list)) and names else None)
    if scalar and classifier and labels not in (None, 1):
        return [f"{name}: its classification head has {labels} labels, but must have one; train one with `oppo rm`"]
    return []


def max_positions(hf_config: Mapping[str, Any]) -> int:
    """Longest context, with RoPE scaling if `max_position_embeddings` leaves it out."""
    positions = int(hf_config.get("max_position_embeddings") or DEFAULT_POSITIONS[hf_config["model_type"]])
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("yarn", "linear") and "factor" in rope:
        original = rope.get("original_max_position_embeddings") or positions
        return max(positions, int(min(original * rope["factor"], MOST_POSITIONS)))
    return positions


def head_dim(hf_config: Mapping[str, Any]) -> int:
    own = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    return int(hf_config.get("head_dim") or (128 if hf_config["model_type"] == "qwen3" else own))


def num_kv_heads(hf_config: Mapping[str, Any]) -> int:
    """All heads by default, 8 for Mistral."""
    default = 8 if hf_config["model_type"] == "mistral" else None
    return int(hf_config.get("num_key_value_heads", default) or hf_config["num_attention_heads"])


def projections(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products. Tensor ranks divide the inputs of `ROWS_OF_SUMS`, the outputs of the others."""
    hidden, ffn, dim = hf_config["hidden_size"], hf_config["intermediate_size"], head_dim(hf_config)
    queries, keys = hf_config["num_attention_heads"] * dim, num_kv_heads(hf_config) * dim
    return {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn),
    }  # fmt: skip


def windows(hf_config: Mapping[str, Any]) -> list[int | None]:
    """Tokens each layer attends to, own included; None: all before."""
    layers, window = hf_config["num_hidden_layers"], hf_config.get("sliding_window", DEFAULT_WINDOW)
    if hf_config["model_type"] == "mistral":
        return [window] * layers
    if not hf_config.get("use_sliding_window"):
        return [None] * layers
    full, sliding = LAYER_TYPES
    first = hf_config.get("max_window_layers", 28)
    kinds = hf_config.get("layer_types") or [full if layer < first else sliding for layer in range(layers)]
    return [window if kind == sliding else None for kind in kinds]


def kv_bytes_per_token(hf_config: Mapping[str, Any], layout: HasSizes, dtype: str) -> int:
    layers = hf_config["num_hidden_layers"] // layout.pp
    return int(2 * layers * (num_kv_heads(hf_config) // layout.tp) * head_dim(hf_config) * DTYPE_BYTES[dtype])


def _check_architecture(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    problems = []
    family = FAMILIES[hf_config["model_type"]]
    supported = [f"{family}ForCausalLM", f"{family}ForSequenceClassification"]
    architectures = hf_config.get("architectures")
    if architectures and (not isinstance(architectures, list) or architectures[0] not in supported):
        shown = architectures[0] if isinstance(architectures, list) else repr(architectures)
        problems.append(f"{name}: architecture {shown} is not supported; use a list of one of {', '.join(supported)}")
    if hf_config.get("hidden_act", "silu") != "silu":
        problems.append(f"{name}: hidden_act is {hf_config['hidden_act']!r}, but only silu is computed; use a model with it")
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key):
            problems.append(f"{name}: {key} is true, but only Qwen2's own biases are computed; use a model without it")
    return problems


def _check_numbers(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in (*REQUIRED, *OPTIONAL_SIZES):
        size = hf_config.get(key)
        if size is None and key in OPTIONAL_SIZES:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            problems.append(_wrong(name, key, size, "be a positive integer"))
    for key in POSITIVE:
        value = hf_config.get(key, 1.0)
        if not _is_positive(value):
            problems.append(_wrong(name, key, value, "be a positive number"))
    return problems


def _check_windows(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    family = hf_config["model_type"]
    if family == "llama":
        return []
    problems = []
    if family == "mistral" or hf_config.get("use_sliding_window"):
        window, first = hf_config.get("sliding_window"), hf_config.get("max_window_layers", 0)
        if not (window is None or (type(window) is int and window > 0)):
            problems.append(_wrong(name, "sliding_window", window, "be a positive integer or null"))
        if type(first) is not int or first < 0:
            problems.append(_wrong(name, "max_window_layers", first, "be an integer of at least 0"))
    kinds, layers = hf_config.get("layer_types"), hf_config["num_hidden_layers"]
    if family == "mistral" or kinds is None:
        return problems
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        rule = f"name one of {', '.join(LAYER_TYPES)} for each of its {layers} layers"
        problems.append(_wrong(name, "layer_types", kinds, rule))
    elif LAYER_TYPES[1] in kinds and not hf_config.get("use_sliding_window"):
        problems.append(
            f"{name}: `layer_types` of its config.json names sliding_attention, but use_sliding_window is not true; set it to "
            "true, or the layers to full_attention"
        )
    return problems


def _wrong(name: str, key: str, value: object, rule: str) -> str:
    return f"{name}: `{key}` of its config.json is {value!r:.80}, but must {rule}; correct it"


def _check_rope(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return [f"{name}: its RoPE parameters are {rope!r}, but must be a mapping; correct its config.json"]
    kind = rope.get("type") or rope.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        return [f"{name}: rope type {kind!r} is not supported; use a model with one of {', '.join(ROPE_KINDS)}"]
    theta = rope.get("rope_theta", hf_config.get("rope_theta", 10000.0))
    needed = {"rope_theta": theta} | {key: rope.get(key) for key in ROPE_KINDS[kind]}
    needed |= {key: rope[key] for key in OPTIONAL_ROPE if rope.get(key) is not None}
    return [
        f"{name}: `{key}` of its RoPE parameters is {value!r}, but must be a positive number; correct its config.json"
        for key, value in needed.items()
        if not _is_positive(value)
    ]


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check_heads(name: str, hf_config: Mapping[str, Any]) -> list[str]:
    problems = []
    heads, kv_heads, hidden = hf_config["num_attention_heads"], num_kv_heads(hf_config), hf_config["hidden_size"]
    if not hf_config.get("head_dim") and hf_config["model_type"] != "qwen3" and hidden % heads:
        problems.append(f"{name}: hidden_size {hidden} does not divide by its {heads} attention heads; correct config.json")
    if heads % kv_heads:
        problems.append(f"{name}: {heads} attention heads do not divide by {kv_heads} key/value heads; correct config.json")
    if head_dim(hf_config) % 2:
        problems.append(f"{name}: head_dim is {head_dim(hf_config)}, but rotary embeddings turn pairs; use an even one")
    return problems


def _check_context(name: str, hf_config: Mapping[str, Any], max_context: int) -> list[str]:
    limit = max_positions(hf_config)
    if max_context <= limit:
        return []
    return [
        f"{name}: contexts of up to {max_context} tokens are asked for, but the model's longest is {limit} "
        "(max_position_embeddings); lower the limits of prompts (held-out ones too) or responses"
    ]


def _check_vocabulary(name: str, hf_config: Mapping[str, Any], tokenizer_vocab_size: int | None) -> list[str]:
    vocab = hf_config["vocab_size"]
    if tokenizer_vocab_size is None or vocab >= tokenizer_vocab_size:
        return []
    return [
        f"{name}: its vocabulary has {vocab} entries, but the tokenizer gives ids up to {tokenizer_vocab_size - 1}; "
        "use the tokenizer that this model was trained with"
    ]
