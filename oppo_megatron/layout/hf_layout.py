"""Places of Hugging Face tensors in a megatron-core model, and checks that a checkpoint has exactly these. H hidden, F ffn, V
vocabulary, D head dim, N query heads, G groups, R = N / G.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from oppo_megatron.config.model import LoraConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.experts import DOWN, GATE_UP, TURNED, Region, size_apart, tensors_apart
from oppo_megatron.layout.shape import ROWS_OF_SUMS, ModelShape, projections

Head = Literal["lm", "scalar"]
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SCALAR_HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A Hugging Face tensor, cut evenly along `cut` over the tensor ranks (None: whole), in the ranges `rows` of `param`.

    Experts are cut over the tensor ranks of `ep` replicas.  If the ranks do not divide the vocabulary, the last share is smaller
    and its remaining rows are zero.  `turned`: matrices are transposed in files; `mixed`: rows of gate and up lie there in turn
    (`TURNED`).
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    cut: int | None
    param: str
    rows: tuple[slice, ...]
    ep: int = 1
    turned: bool = False
    mixed: bool = False

    @property
    def num_rows(self) -> int:
        return sum(r.stop - r.start for r in self.rows)

    def shares(self, tp_size: int) -> int:
        return 1 if self.cut is None else tp_size * self.ep

    def share(self, place: int, tp_size: int) -> tuple[slice, ...]:
        """Return the region of the rank `place` of a stage, or of a tensor rank."""
        region = [slice(0, size) for size in self.hf_shape]
        if self.cut is not None:
            whole = self.hf_shape[self.cut]
            size = self.num_rows if self.cut == 0 else whole // tp_size
            first = place % self.shares(tp_size) * size
            region[self.cut] = slice(min(first, whole), min(first + size, whole))
        return tuple(region)

    def spans(self, start: int, stop: int) -> list[slice]:
        """The parameter's rows that hold rows start .. stop of a rank's share."""
        found, first = [], 0
        for rows in self.rows:
            low, high = max(start - first, 0) + rows.start, min(stop - first + rows.start, rows.stop)
            if low < high:
                found.append(slice(low, high))
            first += rows.stop - rows.start
        return found

    def as_param(self, share: Any) -> Any:
        """Lay out a file's share as the parameter has it; `as_filed`: the reverse."""
        share = share.transpose(1, 2) if self.turned else share
        return share.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.mixed else share

    def as_filed(self, rows: Any) -> Any:
        rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if self.mixed else rows
        return rows.transpose(1, 2).contiguous() if self.turned else rows


def stage_parts(
    shape: ModelShape, head: Head, *, tp_size: int = 1, ep_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> list[Part]:
    """Parts in the model's order. Raises ConfigError if sizes do not divide."""
    sizes = [
        ("num_attention_heads", shape.num_heads, "tp", tp_size),
        ("num_key_value_heads", shape.num_kv_heads, "tp", tp_size),
        ("intermediate_size", shape.ffn_size, "tp", tp_size)
        if shape.experts is None
        else ("number of experts", shape.experts.count, "tp" if ep_size == 1 else "tp x ep", tp_size * ep_size),
        ("num_hidden_layers", shape.num_layers, "pp", pp_size),
    ]
    problems = [
        f"{name} = {size} does not divide by {axis} = {ranks}: each rank must hold an equal share. "
        f"Choose {axis} among the divisors of {size}."
        for name, size, axis, ranks in sizes
        if size % ranks
    ]
    if problems:
        raise ConfigError(problems)
    hidden = shape.hidden_size
    first, last = pp_rank == 0, pp_rank == pp_size - 1
    parts = []
    if first:
        parts.append(_vocab_part(shape, EMBEDDING, "embedding.word_embeddings.weight", tp_size))
    per_stage = shape.num_layers // pp_size
    for layer in range(per_stage):
        parts += _layer_parts(shape, tp_size, ep_size, f"model.layers.{pp_rank * per_stage + layer}.", f"decoder.layers.{layer}.")
    if last:
        parts.append(_part("model.norm.weight", (hidden,), None, "decoder.final_layernorm.weight", tp_size))
        if head == "scalar":
            parts.append(_part(SCALAR_HEAD, (1, hidden), None, "output_layer.weight", tp_size))
        elif not (shape.tied_embeddings and first):  # tied: a stage without the embedding keeps a copy of it
            name = EMBEDDING if shape.tied_embeddings else LM_HEAD
            parts.append(_vocab_part(shape, name, "output_layer.weight", tp_size))
    return parts


def hf_tensors(shape: ModelShape, head: Head) -> dict[str, tuple[int, ...]]:
    return {part.hf_name: part.hf_shape for part in stage_parts(shape, head)}


def stored_names(shape: ModelShape, names: Iterable[str]) -> dict[str, list[str]]:
    """Names in files, each with the tensors whose rows it holds in turn: joined projections, or one tensor."""
    found: dict[str, list[str]] = {}
    for name in names:
        joined = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name))
        found.setdefault(joined if shape.traits.joined else name, []).append(name)
    return found


def size_of_rows(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Size of matrices joined by rows, or of one tensor."""
    return (sum(size[0] for size in sizes), *sizes[0][1:])


def param_shapes(parts: Sequence[Part], tp_size: int = 1) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        rows, *_ = shapes.get(part.param, (0,))
        columns = [region.stop - region.start for region in part.share(0, tp_size)[1:]]
        shapes[part.param] = (rows + part.num_rows, *(reversed(columns) if part.turned else columns))
    return shapes


def _part(hf_name: str, hf_shape: tuple[int, ...], cut: int | None, param: str, tp_size: int) -> Part:
    rows = hf_shape[0] // tp_size if cut == 0 else hf_shape[0]
    return Part(hf_name, hf_shape, cut, param, (slice(0, rows),))


def _vocab_part(shape: ModelShape, hf_name: str, param: str, tp_size: int) -> Part:
    return Part(hf_name, (shape.vocab_size, shape.hidden_size), 0, param, (slice(0, shape.vocab_rows(tp_size)),))


def _layer_parts(shape: ModelShape, tp_size: int, ep_size: int, hf: str, ours: str) -> list[Part]:
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_size, shape.head_dim
    heads_width, heads_per_group = shape.num_heads * head_dim, shape.num_heads // shape.num_kv_heads
    width = (heads_per_group + 2) * head_dim

    def rows(first_head: int, num_heads: int) -> tuple[slice, ...]:
        """Rows of the joint parameter, which has for each group R query heads, key head, value head."""
        start, size = first_head * head_dim, num_heads * head_dim
        groups = range(shape.num_kv_heads // tp_size)
        return tuple(slice(group * width + start, group * width + start + size) for group in groups)

    heads = {"q": (shape.num_heads, rows(0, heads_per_group))}
    heads |= {x: (shape.num_kv_heads, rows(heads_per_group + i, 1)) for i, x in enumerate("kv")}
    row = shape.traits
    kinds = {"weight": (hidden,), **({"bias": ()} if row.qkv_bias else {})}
    attention, hf_attention = f"{ours}self_attention.", f"{hf}self_attn."
    fc1, gate = f"{ours}mlp.linear_fc1.weight", ffn // tp_size
    parts = [
        *(_part(f"{hf}{name}.weight", (hidden,), None, f"{ours}{place}.weight", tp_size) for place, name in row.norms.items()),
        *(
            Part(f"{hf_attention}{x}_proj.{kind}", (num * head_dim, *columns), 0, f"{attention}linear_qkv.{kind}", ranges)
            for kind, columns in kinds.items()
            for x, (num, ranges) in heads.items()
        ),
        _part(f"{hf_attention}o_proj.weight", (hidden, heads_width), 1, f"{attention}linear_proj.weight", tp_size),
    ]
    if row.qk_norm:
        for x in "qk":
            size, cut = (head_dim, None) if row.qk_norm == "head" else (heads[x][0] * head_dim, 0)
            parts.append(_part(f"{hf_attention}{x}_norm.weight", (size,), cut, f"{attention}{x}_layernorm.weight", tp_size))
    if row.biased:
        parts.append(_part(f"{hf_attention}o_proj.bias", (hidden,), None, f"{attention}linear_proj.bias", tp_size))
    if row.sinks:
        parts.append(_part(f"{hf_attention}sinks", (shape.num_heads,), 0, f"{attention}core_attention.softmax_offset", tp_size))
    if (experts := shape.experts) is not None:
        count, turned = experts.count, shape.family in TURNED
        router = f"{hf}mlp.{'router' if turned else 'gate'}"
        parts.append(_part(f"{router}.weight", (count, hidden), None, f"{ours}mlp.router", tp_size))
        if row.biased:
            parts.append(_part(f"{router}.bias", (count,), None, f"{ours}mlp.router_bias", tp_size))
        width, held = experts.ffn_size, (slice(0, count // (tp_size * ep_size)),)
        for name, own, (out, into) in ((GATE_UP, "gate_up", (2 * width, hidden)), (DOWN, "down", (hidden, width))):
            sizes, mixed = (count, into, out) if turned else (count, out, into), turned and name == GATE_UP
            parts.append(Part(f"{hf}{name}", sizes, 0, f"{ours}mlp.{own}", held, ep_size, turned=turned, mixed=mixed))
            if row.biased:
                parts.append(Part(f"{hf}{name}_bias", (count, out), 0, f"{ours}mlp.{own}_bias", held, ep_size, mixed=mixed))
        return parts
    return [
        *parts,
        Part(f"{hf}mlp.gate_proj.weight", (ffn, hidden), 0, fc1, (slice(0, gate),)),
        Part(f"{hf}mlp.up_proj.weight", (ffn, hidden), 0, fc1, (slice(gate, 2 * gate),)),
        _part(f"{hf}mlp.down_proj.weight", (hidden, ffn), 1, f"{ours}mlp.linear_fc2.weight", tp_size),
    ]


PEFT = "base_model.model."


@dataclass(frozen=True)
class Product:
    owner: str
    linear: str
    hf_owner: str
    targets: tuple[str, ...]

    @property
    def cut(self) -> Literal["rows", "columns"]:
        return "columns" if self.targets[0] in ROWS_OF_SUMS else "rows"


PRODUCTS = (
    Product("self_attention", "linear_qkv", "self_attn", ("q_proj", "k_proj", "v_proj")),
    Product("self_attention", "linear_proj", "self_attn", ("o_proj",)),
    Product("mlp", "linear_fc1", "mlp", ("gate_proj", "up_proj")),
    Product("mlp", "linear_fc2", "mlp", ("down_proj",)),
)


def pair_sizes(shape: ModelShape, rank: int, tp: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """(rows, columns) of A and B on a tensor rank."""
    return {
        target: ((rank, inputs // tp), (outputs, rank)) if target in ROWS_OF_SUMS else ((rank, inputs), (outputs // tp, rank))
        for target, (outputs, inputs) in projections(shape.hf).items()
    }


def adapter_parts(
    shape: ModelShape, lora: LoraConfig, head: Head, *, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> list[Part]:
    """A stage's tensors of a peft directory, with a scalar head on the last."""
    per_stage = shape.num_layers // pp_size
    sizes = projections(shape.hf)
    parts = []
    for layer in range(per_stage):
        for product in PRODUCTS:
            for target in (target for target in product.targets if target in sizes and target in lora.projections):
                hf = f"{PEFT}model.layers.{pp_rank * per_stage + layer}.{product.hf_owner}.{target}."
                ours = f"decoder.layers.{layer}.{product.owner}.{product.linear}_lora.{target}."
                outputs, inputs = sizes[target]
                cut_a, cut_b = (1, None) if target in ROWS_OF_SUMS else (None, 0)
                rows_b = outputs if cut_b is None else outputs // tp_size
                rank = lora.rank
                parts += [
                    Part(f"{hf}lora_A.weight", (rank, inputs), cut_a, f"{ours}lora_A", (slice(0, rank),)),
                    Part(f"{hf}lora_B.weight", (outputs, rank), cut_b, f"{ours}lora_B", (slice(0, rows_b),)),
                ]
    if head == "scalar" and pp_rank == pp_size - 1:
        size = (1, shape.hidden_size)
        parts.append(Part(f"{PEFT}{SCALAR_HEAD}", size, None, "output_layer.weight", (slice(0, 1),)))
    return parts


FLOATS = ("F64", "F32", "F16", "BF16")
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Rotary tables, which follow from `config.json`. `lm_head.weight` is also unread under a scalar head or if tied."""
SHOWN = 8
WHOLE = "Use the config.json that belongs to these weights."
UNKNOWN = {
    r"^base_model\.|\.lora_|\.base_layer\.": "It is of adapters that were not merged: save the model after peft's "
    "merge_and_unload, or name the base as checkpoint and the adapters as lora.adapter.",
    r"\.(qweight|qzeros|scales|g_idx|SCB|absmax|\w*quant_map|\w*absmax|quant_state.*|weight_(scale|packed|shape|zero_point)\w*|"
    r"\w+_scale|\w+_zero_point)$": "It belongs to quantised weights: use the checkpoint that is not quantised.",
    r"(^|\.)(v_head|value_head)\.": f"It is of a value head, which is read under the name {SCALAR_HEAD} only: remove it from the "
    "file, by loading the model with transformers and save_pretrained.",
    r"_proj_(blocks|scales)$": "MXFP4 needs bytes [experts, outputs, blocks, 16] in `*_blocks`, [experts, outputs, blocks] in "
    "`*_scales`, and no tensor without these endings: use the complete files of the checkpoint.",
    r"\.bias$": "Only biases of Qwen2's queries, keys and values and of GPT-OSS are computed: use a model without others.",
    "": WHOLE,
}
"""Remedies for unexpected tensors; the first match counts."""


class Tensor(NamedTuple):
    """`dtype`: a code of safetensors."""

    shape: tuple[int, ...]
    dtype: str


BLOCKS, SCALES = "_blocks", "_scales"


def dense(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace pairs in MXFP4 by the matrices that they make: bytes [experts, outputs, blocks, 16] of two numbers, and scales."""
    found = dict(stored)
    for name, (size, dtype) in stored.items():
        whole = name.removesuffix(BLOCKS)
        if whole not in stored and (dtype, size[3:]) == ("U8", (16,)) and stored.get(whole + SCALES) == Tensor(size[:3], "U8"):
            del found[name], found[whole + SCALES]
            found[whole] = Tensor((size[0], 32 * size[2], size[1]), "BF16")
    return found


def weight_problems(shape: ModelShape, head: Head, stored: Mapping[str, Tensor], equal: Callable[[str, str], bool]) -> list[str]:
    """A sentence per missing, misshapen or unexpected tensor. `equal` compares content; the rest needs headers only."""
    stored = dense(stored)
    expected = {
        part: size_apart(size, region)
        for name, size in hf_tensors(shape, head).items()
        for part, region in _as_stored(shape, name, size, stored).items()
    }
    for name, names in stored_names(shape, expected).items():
        if len(names) > 1 and not stored.keys() >= set(names):
            expected[name] = size_of_rows([expected.pop(part) for part in names])
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


def _as_stored(shape: ModelShape, name: str, size: tuple[int, ...], stored: Mapping[str, Tensor]) -> dict[str, Region]:
    parts = tensors_apart(shape.family, name, size)
    return parts if name not in stored and not stored.keys().isdisjoint(parts) else {name: ()}


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
