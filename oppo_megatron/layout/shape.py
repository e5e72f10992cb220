"""A model's shape, from its Hugging Face `config.json`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.config.model import HEADS_LEARNED
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout import families
from oppo_megatron.layout.experts import EXPERTS, Experts, experts_of, faults_of_experts, ffn_width
from oppo_megatron.layout.families import LAYER_TYPES, Traits, traits
from oppo_megatron.layout.families import Shape as Shape
from oppo_megatron.layout.layouts import HasSizes, Limits, Sizes, divisors, fills_shards, suggestion, vocab_rows

REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
POSITIVE = ("rms_norm_eps", "initializer_range")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MOST_POSITIONS = 2**62  # bounds an absurd factor
ROWS_OF_SUMS = ("o_proj", "down_proj")


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
    if not shape.get("head_dim") and traits(shape).head_dim is None and hidden % heads:
        problems.append(f"{name}: hidden_size {hidden} does not divide by its {heads} attention heads; correct config.json")
    if heads % kv_heads:
        problems.append(f"{name}: {heads} attention heads do not divide by {kv_heads} key/value heads; correct config.json")
    if (turned := families.rotary_dim(shape, head_dim(shape))) % 2 or not turned:
        problems.append(
            f"{name}: head_dim is {head_dim(shape)}, and {turned} numbers of it are rotated, in pairs; use an even number above 0"
        )
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
    tp, pp, vpp = sizes.tp, sizes.pp, sizes.vpp
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
    problems += [f"{name}: {problem}" for problem in _faults_of_ep(sizes, limits)]
    near = suggestion(sizes, num_ranks, limits) if problems else ""
    return [problem + near for problem in problems]


def _faults_of_ep(sizes: Sizes, limits: Limits) -> Iterator[str]:
    tp, dp, cp, ep = sizes.tp, sizes.dp, sizes.cp, sizes.ep
    if ep == 1:
        return
    fitting = ", ".join(map(str, divisors(math.gcd(dp, limits.experts // tp or 1))))
    if limits.experts == 1:
        yield f"ep is {ep}, but the model has no experts that replicas could divide; set ep to 1"
    elif cp > 1:
        yield f"ep is {ep} and cp {cp}, but replicas that divide experts do not share sequences; set one of them to 1"
    elif dp % ep:
        yield f"dp {dp} does not divide by ep {ep}, the number of replicas that divide experts; choose ep from {fitting}"
    elif limits.experts % tp == 0 and limits.experts % (tp * ep):
        yield f"number of experts {limits.experts} does not divide by tp {tp} x ep {ep} = {tp * ep}; choose ep from {fitting}"


def model_limits(shape: Shape, sequences: int | None = None, min_tp: int = 1) -> Limits:
    width = math.gcd(shape["num_attention_heads"], num_kv_heads(shape), _divided_ffn(shape)[1])
    experts = experts_of(shape)
    count = 1 if experts is None else experts.count
    return Limits(width, shape["num_hidden_layers"], sequences, min_tp, shape["vocab_size"], count)


def _divided_ffn(shape: Shape) -> tuple[str, int]:
    """Name and size that tensor ranks divide: experts, whole, or the width of the one feed-forward."""
    experts = experts_of(shape)
    return ("intermediate_size", shape["intermediate_size"]) if experts is None else ("number of experts", experts.count)


def check_model(name: str, shape: Shape) -> list[str]:
    family = shape.get("model_type")
    if not isinstance(family, str) or family not in families.FAMILIES:
        return [f"{name}: model_type {family!r} is not supported; use one of {families.LISTED}"]
    problems, numbers = list[str](), list[str]()
    supported = families.classes_of(family)
    architectures = shape.get("architectures")
    if architectures and (not isinstance(architectures, list) or architectures[0] not in supported):
        shown = architectures[0] if isinstance(architectures, list) else repr(architectures)
        problems.append(f"{name}: architecture {shown} is not supported; use a list of one of {', '.join(supported)}")
    for key, due in (("attention_bias", traits(shape).biased), ("mlp_bias", False)):
        if bool(shape.get(key, due)) != due:
            own = "GPT-OSS is computed with its" if due else "only Qwen2's and GPT-OSS's own biases are computed"
            problems.append(f"{name}: {key} is {str(not due).lower()}, but {own}; use a model with{'' if due else 'out'} it")
    for key in (*REQUIRED, *OPTIONAL_SIZES):
        size = shape.get(key)
        if size is None and key in OPTIONAL_SIZES:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            numbers.append(_wrong(name, key, size, "be a positive integer"))
    for key in POSITIVE:
        value = shape.get(key, 1.0)
        if not families.is_positive(value):
            numbers.append(_wrong(name, key, value, "be a positive number"))
    if not numbers:
        numbers = [_wrong(name, *fault) for fault in (*faults_of_experts(shape), *families.faults_of_family(shape))]
    return problems + (numbers or _check_rope(name, shape))


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
    positions = int(shape.get("max_position_embeddings") or traits(shape).positions)
    rope, *local = families.ropes(shape)
    if rope["rope_type"] in ("yarn", "linear") and "factor" in rope and not local:
        original = rope.get("original_max_position_embeddings") or positions
        return max(positions, int(min(original * rope["factor"], MOST_POSITIONS)))
    return positions


def head_dim(shape: Shape) -> int:
    return int(shape.get("head_dim") or traits(shape).head_dim or shape["hidden_size"] // shape["num_attention_heads"])


def num_kv_heads(shape: Shape) -> int:
    """All heads by default in most families."""
    return int(shape.get("num_key_value_heads", traits(shape).kv_heads) or shape["num_attention_heads"])


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products without experts. Tensor ranks divide inputs of `ROWS_OF_SUMS`, else outputs."""
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], head_dim(shape)
    queries, keys = shape["num_attention_heads"] * dim, num_kv_heads(shape) * dim
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    if shape["model_type"] in EXPERTS:
        return attention
    return attention | {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}


def norm_weights(shape: Shape, tp: int = 1) -> int:
    """Weights of a layer's norms on a tensor rank."""
    sizes, row = projections(shape), traits(shape)
    of_heads = {"": 0, "head": 2 * head_dim(shape), "width": (sizes["q_proj"][0] + sizes["k_proj"][0]) // tp}
    return len(row.norms) * int(shape["hidden_size"]) + of_heads[row.qk_norm]


def kv_bytes_per_token(shape: Shape, layout: HasSizes, dtype: str) -> int:
    layers = shape["num_hidden_layers"] // layout.pp
    return int(2 * layers * (num_kv_heads(shape) // layout.tp) * head_dim(shape) * DTYPE_BYTES[dtype])


def _wrong(name: str, key: str, value: object, rule: str) -> str:
    return f"{name}: `{key}` of its config.json is {value!r:.80}, but must {rule}; correct it"


def _check_rope(name: str, shape: Shape) -> list[str]:
    for rope in (shape.get(key) or {} for key in ("rope_parameters", "rope_scaling")):
        if not isinstance(rope, Mapping) or any(not isinstance(rope.get(each) or {}, Mapping) for each in LAYER_TYPES):
            return [f"{name}: its RoPE parameters are {rope!r}, but must be a mapping; correct its config.json"]
    known = traits(shape).rope_kinds or tuple(families.ROPE_KINDS)
    for kind in (each["rope_type"] for each in families.ropes(shape)):
        if kind not in known:
            return [f"{name}: rope type {kind!r} is not supported; use a model with one of {', '.join(known)}"]
    return [
        f"{name}: `{key}` of its RoPE parameters is {value!r:.80}, but must {rule}; correct its config.json"
        for key, value, rule in families.faults_of_rope(shape, head_dim(shape))
    ]


@dataclass(frozen=True)
class ModelShape:
    """`windows`: tokens a layer attends to, own included (None: all); `vocab_multiple`: padding of the vocabulary.

    `ropes`: RoPE parameters, of layers without a window first if there are two; `tables`: the number of each layer's.
    """

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
    traits: Traits
    tied_embeddings: bool
    ropes: Sequence[Mapping[str, Any]]
    windows: tuple[int | None, ...]
    tables: tuple[int, ...]
    rotary_dim: int
    attention_scale: float
    attention_cap: float | None = None
    final_cap: float | None = None
    experts: Experts | None = None
    vocab_multiple: int = 1
    hf: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Raises CheckpointError for an unsupported family or feature."""
        if problems := check_model(where, hf):
            raise CheckpointError("\n".join(problems))
        row, dim, (attention_cap, final_cap), rotations = traits(hf), head_dim(hf), families.caps(hf), families.ropes(hf)
        kinds = families.layer_types(hf) if len(rotations) > 1 else [families.FULL] * hf["num_hidden_layers"]
        scalar = row.query_scalar and hf.get("query_pre_attn_scalar", row.query_scalar)
        return cls(
            family=hf["model_type"],
            num_layers=int(hf["num_hidden_layers"]),
            hidden_size=int(hf["hidden_size"]),
            ffn_size=int(hf["intermediate_size"]),
            experts=experts_of(hf),
            num_heads=int(hf["num_attention_heads"]),
            num_kv_heads=num_kv_heads(hf),
            head_dim=dim,
            vocab_size=int(hf["vocab_size"]),
            max_positions=max_positions(hf),
            norm_eps=float(hf.get("rms_norm_eps", row.norm_eps)),
            init_std=float(hf.get("initializer_range", 0.02)),
            traits=row,
            tied_embeddings=families.is_tied(hf),
            ropes=rotations,
            windows=tuple(families.windows(hf)),
            tables=tuple(LAYER_TYPES.index(kind) for kind in kinds),
            rotary_dim=families.rotary_dim(hf, dim),
            attention_scale=(scalar or dim) ** -0.5,
            attention_cap=attention_cap,
            final_cap=final_cap,
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
