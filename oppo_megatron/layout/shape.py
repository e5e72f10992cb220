"""A model's shape, from its Hugging Face `config.json`."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.config.model import HEADS_LEARNED
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.experts import EXPERTS, Experts, experts_of, faults_of_experts, ffn_width
from oppo_megatron.layout.layouts import HasSizes, Limits, Sizes, divisors, fills_shards, suggestion, vocab_rows

Shape = Mapping[str, Any]
"""A `config.json`."""
FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
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
DEFAULT_POSITIONS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072, "qwen3_moe": 32768,
}  # fmt: skip
DEFAULT_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4}
DEFAULT_WINDOW = 4096
ROWS_OF_SUMS = ("o_proj", "down_proj")
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_shape(name: str, shape: Shape, layout: HasSizes, max_context: int, tokenizer_vocab_size: int | None) -> list[str]:
    sizes = Sizes.of(layout)
    own = check_use(name, shape, max_context, tokenizer_vocab_size)
    if check_model(name, shape):
        return own
    return own + check_divisions(name, shape, sizes, sizes.num_ranks, model_limits(shape))


def check_use(name: str, shape: Shape, max_context: int, tokenizer_vocab_size: int | None) -> list[str]:
    """`check_shape` without a layout."""
    if problems := check_model(name, shape):
        return problems
    heads, kv_heads, hidden = shape["num_attention_heads"], num_kv_heads(shape), shape["hidden_size"]
    if not shape.get("head_dim") and shape["model_type"] != "qwen3" and hidden % heads:
        problems.append(f"{name}: hidden_size {hidden} does not divide by its {heads} attention heads; correct config.json")
    if heads % kv_heads:
        problems.append(f"{name}: {heads} attention heads do not divide by {kv_heads} key/value heads; correct config.json")
    if head_dim(shape) % 2:
        problems.append(f"{name}: head_dim is {head_dim(shape)}, but rotary embeddings turn pairs; use an even one")
    longest, vocab = max_positions(shape), shape["vocab_size"]
    if max_context > longest:
        problems.append(
            f"{name}: contexts of up to {max_context} tokens are asked for, but the model's longest is {longest} "
            "(max_position_embeddings); lower the limits of prompts (held-out ones too) or responses"
        )
    if tokenizer_vocab_size is not None and vocab < tokenizer_vocab_size:
        problems.append(
            f"{name}: its vocabulary has {vocab} entries, but the tokenizer gives ids up to {tokenizer_vocab_size - 1}; "
            "use the tokenizer that this model was trained with"
        )
    return problems


def check_divisions(name: str, shape: Shape, sizes: Sizes, num_ranks: int, limits: Limits) -> list[str]:
    problems = []
    tp, pp, _, vpp = sizes
    heads, kv_heads, layers = shape["num_attention_heads"], num_kv_heads(shape), shape["num_hidden_layers"]
    vocab, (ffn_name, ffn) = shape["vocab_size"], _divided_ffn(shape)
    widths = ", ".join(map(str, divisors(limits.width)))
    for count, what in (
        (heads, f"{heads} attention heads do"),
        (kv_heads, f"{kv_heads} key/value heads do"),
        (ffn, f"{ffn_name} {ffn} does"),
    ):
        if count % tp:
            problems.append(f"{name}: {what} not divide by tp {tp}; choose tp from {widths}")
    if not fills_shards(vocab, tp):
        problems.append(
            f"{name}: vocab_size {vocab} leaves a rank of tp {tp} without a token ({vocab_rows(vocab, tp)} per rank); lower tp"
        )
    fitting = ", ".join(map(str, divisors(layers)))
    if layers % pp:
        problems.append(f"{name}: {layers} layers do not divide by pp {pp}; choose pp from {fitting}")
    elif layers % (pp * vpp):
        problems.append(f"{name}: {layers} layers do not divide by pp {pp} x vpp {vpp} = {pp * vpp}; use pp x vpp of {fitting}")
    near = suggestion(sizes, num_ranks, limits) if problems else ""
    return [problem + near for problem in problems]


def model_limits(shape: Shape, sequences: int | None = None, min_tp: int = 1) -> Limits:
    width = math.gcd(shape["num_attention_heads"], num_kv_heads(shape), _divided_ffn(shape)[1])
    return Limits(width, shape["num_hidden_layers"], sequences, min_tp, shape["vocab_size"])


def _divided_ffn(shape: Shape) -> tuple[str, int]:
    """Name and size that tensor ranks divide: experts, whole, or the width of the one feed-forward."""
    experts = experts_of(shape)
    return ("intermediate_size", shape["intermediate_size"]) if experts is None else ("number of experts", experts.count)


def check_model(name: str, shape: Shape) -> list[str]:
    family = shape.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return [f"{name}: model_type {family!r} is not supported; use one of {', '.join(FAMILIES)} (Qwen2.5 is qwen2)"]
    problems, numbers = list[str](), list[str]()
    supported = [f"{FAMILIES[family]}ForCausalLM", f"{FAMILIES[family]}ForSequenceClassification"]
    architectures = shape.get("architectures")
    if architectures and (not isinstance(architectures, list) or architectures[0] not in supported):
        shown = architectures[0] if isinstance(architectures, list) else repr(architectures)
        problems.append(f"{name}: architecture {shown} is not supported; use a list of one of {', '.join(supported)}")
    if shape.get("hidden_act", "silu") != "silu":
        problems.append(f"{name}: hidden_act is {shape['hidden_act']!r}, but only silu is computed; use a model with it")
    for key in ("attention_bias", "mlp_bias"):
        if shape.get(key):
            problems.append(f"{name}: {key} is true, but only Qwen2's own biases are computed; use a model without it")
    for key in (*REQUIRED, *OPTIONAL_SIZES):
        size = shape.get(key)
        if size is None and key in OPTIONAL_SIZES:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            numbers.append(_wrong(name, key, size, "be a positive integer"))
    for key in POSITIVE:
        value = shape.get(key, 1.0)
        if not _is_positive(value):
            numbers.append(_wrong(name, key, value, "be a positive number"))
    if not numbers:
        numbers = [_wrong(name, *fault) for fault in faults_of_experts(shape)] + _check_windows(name, shape)
    return problems + numbers + _check_rope(name, shape)


def _architecture(shape: Shape) -> str:
    architectures = shape.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def is_classifier(shape: Shape) -> bool:
    return _architecture(shape).endswith("ForSequenceClassification")


def check_head(name: str, shape: Shape, *, scalar: bool) -> list[str]:
    """Check the head of a checkpoint; a learned head may start new."""
    architecture, classifier = _architecture(shape), is_classifier(shape)
    if not scalar and classifier:
        return [f"{name}: its checkpoint is a {architecture} without a language-model head; use a *ForCausalLM checkpoint"]
    if scalar and not classifier and name not in HEADS_LEARNED:
        return [
            f"{name}: its checkpoint is a {architecture or 'model of unknown class'}, but a scalar head is needed; "
            "use a *ForSequenceClassification checkpoint, as `oppo rm` trains one (`weights/` of its run_dir): a frozen model's "
            "new head would score at random"
        ]
    names = shape.get("id2label")
    labels = shape.get("num_labels", len(names) if isinstance(names, (dict, list)) and names else None)
    if scalar and classifier and labels not in (None, 1):
        return [f"{name}: its classification head has {labels} labels, but must have one; train one with `oppo rm`"]
    return []


def max_positions(shape: Shape) -> int:
    """Longest context, with RoPE scaling if `max_position_embeddings` leaves it out."""
    positions = int(shape.get("max_position_embeddings") or DEFAULT_POSITIONS[shape["model_type"]])
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("yarn", "linear") and "factor" in rope:
        original = rope.get("original_max_position_embeddings") or positions
        return max(positions, int(min(original * rope["factor"], MOST_POSITIONS)))
    return positions


def head_dim(shape: Shape) -> int:
    own = shape["hidden_size"] // shape["num_attention_heads"]
    return int(shape.get("head_dim") or (128 if shape["model_type"] == "qwen3" else own))


def num_kv_heads(shape: Shape) -> int:
    """All heads by default in most families."""
    default = DEFAULT_KV_HEADS.get(shape["model_type"])
    return int(shape.get("num_key_value_heads", default) or shape["num_attention_heads"])


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products without experts. Tensor ranks divide inputs of `ROWS_OF_SUMS`, else outputs."""
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], head_dim(shape)
    queries, keys = shape["num_attention_heads"] * dim, num_kv_heads(shape) * dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    if shape["model_type"] in EXPERTS:
        return attention
    return attention | {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}


def has_head_norms(shape: Shape) -> bool:
    return shape["model_type"] in ("qwen3", "qwen3_moe")


def windows(shape: Shape) -> list[int | None]:
    """Tokens each layer attends to, own included; None: all before."""
    layers, window = shape["num_hidden_layers"], shape.get("sliding_window", DEFAULT_WINDOW)
    if shape["model_type"] == "mixtral":
        return [shape.get("sliding_window")] * layers
    if shape["model_type"] == "mistral" or (shape["model_type"] == "qwen3_moe" and shape.get("use_sliding_window")):
        return [window] * layers
    if not shape.get("use_sliding_window"):
        return [None] * layers
    full, sliding = LAYER_TYPES
    first = shape.get("max_window_layers", 28)
    kinds = shape.get("layer_types") or [full if layer < first else sliding for layer in range(layers)]
    return [window if kind == sliding else None for kind in kinds]


def kv_bytes_per_token(shape: Shape, layout: HasSizes, dtype: str) -> int:
    layers = shape["num_hidden_layers"] // layout.pp
    return int(2 * layers * (num_kv_heads(shape) // layout.tp) * head_dim(shape) * DTYPE_BYTES[dtype])


def _check_windows(name: str, shape: Shape) -> list[str]:
    family = shape["model_type"]
    if family == "llama":
        return []
    problems = []
    if family in ("mistral", "mixtral") or shape.get("use_sliding_window"):
        window, first = shape.get("sliding_window"), shape.get("max_window_layers", 0)
        if not (window is None or (type(window) is int and window > 0)):
            problems.append(_wrong(name, "sliding_window", window, "be a positive integer or null"))
        if type(first) is not int or first < 0:
            problems.append(_wrong(name, "max_window_layers", first, "be an integer of at least 0"))
    kinds, layers = shape.get("layer_types"), shape["num_hidden_layers"]
    if family == "mistral" or family in EXPERTS or kinds is None:
        return problems
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        rule = f"name one of {', '.join(LAYER_TYPES)} for each of its {layers} layers"
        problems.append(_wrong(name, "layer_types", kinds, rule))
    elif LAYER_TYPES[1] in kinds and not shape.get("use_sliding_window"):
        problems.append(
            f"{name}: `layer_types` of its config.json names sliding_attention, but use_sliding_window is not true; set it to "
            "true, or the layers to full_attention"
        )
    return problems


def _wrong(name: str, key: str, value: object, rule: str) -> str:
    return f"{name}: `{key}` of its config.json is {value!r:.80}, but must {rule}; correct it"


def _check_rope(name: str, shape: Shape) -> list[str]:
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return [f"{name}: its RoPE parameters are {rope!r}, but must be a mapping; correct its config.json"]
    kind = rope.get("type") or rope.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        return [f"{name}: rope type {kind!r} is not supported; use a model with one of {', '.join(ROPE_KINDS)}"]
    theta = rope.get("rope_theta", shape.get("rope_theta", 10000.0))
    needed = {"rope_theta": theta} | {key: rope.get(key) for key in ROPE_KINDS[kind]}
    needed |= {key: rope[key] for key in OPTIONAL_ROPE if rope.get(key) is not None}
    return [
        f"{name}: `{key}` of its RoPE parameters is {value!r}, but must be a positive number; correct its config.json"
        for key, value in needed.items()
        if not _is_positive(value)
    ]


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class ModelShape:
    """`windows`: tokens a layer attends to, own included (None: all); `vocab_multiple`: padding of the vocabulary."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    init_std: float
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    vocab_multiple: int = 1
    hf: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Raises CheckpointError for an unsupported family or feature."""
        if problems := check_model(where, hf):
            raise CheckpointError("\n".join(problems))
        family = hf["model_type"]
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        rope.setdefault("rope_theta", hf.get("rope_theta", 1e6 if family == "mixtral" else 10000.0))
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
        return cls(
            family=str(family),
            num_layers=int(hf["num_hidden_layers"]),
            hidden_size=int(hf["hidden_size"]),
            ffn_size=int(hf["intermediate_size"]),
            experts=experts_of(hf),
            num_heads=int(hf["num_attention_heads"]),
            num_kv_heads=num_kv_heads(hf),
            head_dim=head_dim(hf),
            vocab_size=int(hf["vocab_size"]),
            max_positions=max_positions(hf),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            init_std=float(hf.get("initializer_range", 0.02)),
            qkv_bias=family == "qwen2",
            qk_norm=has_head_norms(hf),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rope=rope,
            windows=tuple(windows(hf)),
            hf=copy.deepcopy(dict(hf)),
        )

    def vocab_rows(self, tp: int) -> int:
        return vocab_rows(self.vocab_size, tp, self.vocab_multiple)


@dataclass(frozen=True)
class Linear:
    """A weight matrix, `out` x `into`."""

    out: int
    into: int

    @property
    def size(self) -> int:
        return self.out * self.into


def layer_linears(shape: Shape) -> list[Linear]:
    """A layer's products: qkv, output, gate with up, down; experts as one feed-forward."""
    hidden, ffn, dim = shape["hidden_size"], ffn_width(shape), head_dim(shape)
    query, keys = shape["num_attention_heads"] * dim, num_kv_heads(shape) * dim
    return [Linear(query + 2 * keys, hidden), Linear(hidden, query), Linear(2 * ffn, hidden), Linear(hidden, ffn)]


def layer_weights(shape: Shape) -> int:
    return sum(linear.size for linear in layer_linears(shape))


def head_linear(shape: Shape, *, scalar: bool) -> Linear:
    return Linear(1 if scalar else shape["vocab_size"], shape["hidden_size"])


def causal_pairs(past: int, new: int) -> int:
    """Pairs of `new` tokens after `past` ones."""
    return new * past + new * (new + 1) // 2


def weight_bytes(shape: Shape, dtype: str, *, scalar: bool) -> int:
    """Bytes of all matrices that a forward reads (single rows of the embedding do not count)."""
    layers = int(shape["num_hidden_layers"]) * layer_weights(shape)
    return DTYPE_BYTES[dtype] * (layers + head_linear(shape, scalar=scalar).size)
