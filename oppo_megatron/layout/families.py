"""Families of models as rows of a table (docs/families.md), and what follows from a row and a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CAPS = ATTENTION_CAP, FINAL_CAP = ("attn_logit_softcapping", "final_logit_softcapping")
Shape = Mapping[str, Any]
"""A `config.json`."""
BEFORE = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
AFTER = {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"}
AROUND = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_feedforward_layernorm"} | AFTER


@dataclass(frozen=True)
class Traits:
    """Particulars of a family; numbers are defaults of keys in `config.json`."""

    classes: str
    """Beginning of the names of transformers' classes; `classifier`: of the classifier's, if it differs."""
    positions: int
    classifier: str = ""
    kv_heads: int | None = None  # as many as query heads
    head_dim: int | None = None  # hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    theta: float = 10000.0
    local_theta: float | None = None  # of RoPE of their own that layers with a window have
    partial: bool = False  # only a part of a head may be rotated
    rope_kinds: tuple[str, ...] = ()  # all of `ROPE_KINDS`
    rope: Shape = field(default_factory=dict)
    tied: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    """Names in files, by places in megatron-core's layer (`*_bda.norm`: before a residual sum)."""
    norm_offset: float = 0.0  # added to the stored weights of norms
    qk_norm: Literal["", "head", "width"] = ""  # of each head, or over the whole width of queries and of keys
    qkv_bias: bool = False
    biased: bool = False  # the output projection, routers and experts too
    sinks: bool = False  # a learned logit per query head, of a key without a value
    activation: tuple[str, str] = ("hidden_act", "silu")  # key and value
    joined: bool = False  # files join queries, keys and values, and gate and up
    windowed: Literal["no", "all", "some"] = "no"
    """Layers with windows; some: all but each `full_every`-th or, if that is 0, those from `max_window_layers` on."""
    full_every: int = 0
    asks: bool = False  # windows need `use_sliding_window`
    window: int | None = 4096
    query_scalar: float | None = None  # attention is scaled by its inverse root, not by the head dim's
    scaled_embedding: bool = False  # by the root of the hidden size
    caps: Mapping[str, float | None] = field(default_factory=dict)  # keys of `CAPS` that the family has


_GEMMA: dict[str, Any] = {
    "head_dim": 256, "kv_heads": 4, "tied": True, "norms": AROUND, "norm_offset": 1.0, "windowed": "some", "query_scalar": 256.0,
    "activation": ("hidden_activation", "gelu_pytorch_tanh"), "scaled_embedding": True,
}  # fmt: skip
FAMILIES = {
    "llama": Traits("Llama", 2048),
    "mistral": Traits("Mistral", 131072, kv_heads=8, windowed="all"),
    "qwen2": Traits("Qwen2", 32768, qkv_bias=True, windowed="some", asks=True),
    "qwen3": Traits("Qwen3", 32768, head_dim=128, qk_norm="head", windowed="some", asks=True),
    "mixtral": Traits("Mixtral", 131072, kv_heads=8, theta=1e6, windowed="all", window=None),
    "qwen3_moe": Traits("Qwen3Moe", 32768, kv_heads=4, qk_norm="head", windowed="all", asks=True),
    "phi3": Traits(
        "Phi3", 4096, norm_eps=1e-5, joined=True, partial=True, rope_kinds=("default", "longrope"), windowed="all", window=None,
    ),
    "olmo2": Traits("Olmo2", 2048, norm_eps=1e-5, norms=AFTER, qk_norm="width"),
    "gemma2": Traits("Gemma2", 8192, full_every=2, caps={ATTENTION_CAP: 50.0, FINAL_CAP: 30.0}, **_GEMMA),
    "gemma3_text": Traits(
        "Gemma3", 131072, "Gemma3Text", theta=1e6, local_theta=10000.0, qk_norm="head", full_every=6, caps={FINAL_CAP: None},
        **_GEMMA,
    ),
    "gpt_oss": Traits(
        "GptOss", 131072, kv_heads=8, head_dim=64, norm_eps=1e-5, theta=150000.0, qkv_bias=True, biased=True, sinks=True,
        rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        windowed="some", full_every=2, window=128,
    ),
}  # fmt: skip
LISTED = f"{', '.join(FAMILIES)} (Qwen2.5 is qwen2, Phi-4 is phi3)"
LAYER_TYPES = FULL, SLIDING = ("full_attention", "sliding_attention")
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": (),
}
"""Numbers required in addition to `rope_theta`."""
OPTIONAL_ROPE = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
BESIDE_ROPE = ("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor")
"""Keys outside RoPE parameters that the frequencies depend on."""
LISTS_OF_ROPE = ("short_factor", "long_factor")
Fault = tuple[str, object, str]
"""A key, its value and the rule that it breaks."""


def traits(shape: Shape) -> Traits:
    return FAMILIES[shape["model_type"]]


def classes_of(family: str) -> tuple[str, str]:
    """Names of transformers' classes: language model, classifier."""
    row = FAMILIES[family]
    return f"{row.classes}ForCausalLM", f"{row.classifier or row.classes}ForSequenceClassification"


def is_tied(shape: Shape) -> bool:
    return bool(shape.get("tie_word_embeddings", traits(shape).tied))


def caps(shape: Shape) -> tuple[float | None, float | None]:
    """Soft caps c of attention's and of the output's logits, c tanh(x / c); None: no cap."""
    defaults = traits(shape).caps
    attention, final = (shape.get(key, defaults[key]) if key in defaults else None for key in CAPS)
    return attention, final


def composes_attention(shape: Shape) -> bool:
    """True if torch's own attention lacks what the family's has: a soft cap or sinks."""
    return caps(shape)[0] is not None or traits(shape).sinks


def windows(shape: Shape) -> list[int | None]:
    """Tokens each layer attends to, own included; None: all before."""
    row, layers = traits(shape), shape["num_hidden_layers"]
    if row.windowed == "no" or (row.asks and not shape.get("use_sliding_window")):
        return [None] * layers
    window = shape.get("sliding_window", row.window)
    return [window if kind == SLIDING else None for kind in layer_types(shape)]


def layer_types(shape: Shape) -> list[str]:
    """Kinds of a model's layers, if its family has windows."""
    row, layers = traits(shape), range(shape["num_hidden_layers"])
    if row.windowed == "all":
        return [SLIDING for _ in layers]
    if shape.get("layer_types"):
        return list(shape["layer_types"])
    if row.full_every:
        every = shape.get("sliding_window_pattern", row.full_every)
        return [SLIDING if (layer + 1) % every else FULL for layer in layers]
    first = shape.get("max_window_layers", 28)
    return [FULL if layer < first else SLIDING for layer in layers]


def ropes(shape: Shape) -> list[dict[str, Any]]:
    """RoPE parameters; a second set, of layers with a window, if these have their own."""
    row, given = traits(shape), shape.get("rope_parameters")
    if row.local_theta is None:  # as transformers, which prefers the older key
        return [_rope(shape.get("rope_scaling") or (row.rope if given is None else given), shape.get("rope_theta", row.theta))]
    given = given or {}
    main = given.get(FULL) or shape.get("rope_scaling") or {}
    local = shape.get("rope_local_base_freq", row.local_theta)
    return [_rope(main, shape.get("rope_theta", row.theta)), _rope(given.get(SLIDING) or {}, local)]


def _rope(given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    rope = {"rope_theta": theta} | dict(given)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return rope


def rotary_dim(shape: Shape, head_dim: int) -> int:
    """Numbers of a head that are rotated, which are the first ones."""
    share = _rotated(shape)
    return head_dim if share is None else int(head_dim * share)


def _rotated(shape: Shape) -> Any:
    return ropes(shape)[0].get("partial_rotary_factor", shape.get("partial_rotary_factor"))


def faults_of_family(shape: Shape) -> Iterator[Fault]:
    """Yield faults of windows, scales and caps."""
    row = traits(shape)
    key, value = row.activation
    if shape.get(key, value) != value:
        yield key, shape[key], f"be {value}, the family's own activation"
    if shape.get("use_bidirectional_attention"):
        yield "use_bidirectional_attention", shape["use_bidirectional_attention"], "be false, because attention is causal"
    for name in (*CAPS, "query_pre_attn_scalar"):
        if shape.get(name) is not None and not is_positive(shape[name]):
            yield name, shape[name], "be a positive number" + (" or null" if name in CAPS else "")
    if row.windowed != "no":
        yield from _faults_of_windows(shape, row)


def _faults_of_windows(shape: Shape, row: Traits) -> Iterator[Fault]:
    if not row.asks or shape.get("use_sliding_window"):
        window, first = shape.get("sliding_window"), shape.get("max_window_layers", 0)
        if not (window is None or (type(window) is int and window > 0)):
            yield "sliding_window", window, "be a positive integer or null"
        if type(first) is not int or first < 0:
            yield "max_window_layers", first, "be an integer of at least 0"
        every = shape.get("sliding_window_pattern", 1)
        if type(every) is not int or every < 1:
            yield "sliding_window_pattern", every, "be a positive integer"
    kinds, layers = shape.get("layer_types"), shape["num_hidden_layers"]
    if row.windowed == "all" or kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        yield "layer_types", kinds, f"name one of {', '.join(LAYER_TYPES)} for each of its {layers} layers"
    elif row.asks and SLIDING in kinds and not shape.get("use_sliding_window"):
        yield "layer_types", SLIDING, "name it only if use_sliding_window is true"


def faults_of_rope(shape: Shape, head_dim: int) -> Iterator[Fault]:
    """Yield faults of numbers in RoPE parameters, whose kinds are known."""
    share, partial = _rotated(shape), traits(shape).partial
    if share is not None and not (is_positive(share) and (share == 1 or (partial and share < 1))):
        yield "partial_rotary_factor", share, "be positive and at most 1" if partial else "be 1: the family rotates whole heads"
        return
    original = shape.get("original_max_position_embeddings")
    if original is not None and (type(original) is not int or original < 1):
        yield "original_max_position_embeddings", original, "be a positive integer"
    for rope in ropes(shape):
        kind = rope["rope_type"]
        needed = {"rope_theta": rope["rope_theta"]} | {key: rope.get(key) for key in ROPE_KINDS[kind]}
        needed |= {key: rope[key] for key in OPTIONAL_ROPE if rope.get(key) is not None}
        wrong = [(key, value, "be a positive number") for key, value in needed.items() if not is_positive(value)]
        yield from wrong
        if not wrong and kind == "longrope":
            pairs = rotary_dim(shape, head_dim) // 2
            for key in LISTS_OF_ROPE:
                value = rope.get(key)
                if not isinstance(value, list) or len(value) != pairs or not all(map(is_positive, value)):
                    yield key, value, f"be a list of {pairs} positive numbers, one per rotated pair of a head"


def is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
