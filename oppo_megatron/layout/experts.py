"""Mixtures of experts: sizes in `config.json`, and tensors in files, one of all experts (transformers 5) or one of each (hub)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oppo_megatron.layout.families import is_positive


@dataclass(frozen=True)
class Experts:
    """A router chooses `active` of `count` feed-forwards for each token; `normalised`: their weights sum to 1.

    `clamp`: limit and gain of a clamped activation (`mcore.layers.gated`).
    """

    count: int
    active: int
    ffn_size: int
    normalised: bool
    clamp: tuple[float, float] | None = None


MOST_EXPERTS = 255
EXPERTS = {
    "mixtral": ("num_local_experts", 8, 2, "intermediate_size", 14336),
    "qwen3_moe": ("num_experts", 128, 8, "moe_intermediate_size", 768),
    "gpt_oss": ("num_local_experts", 128, 4, "intermediate_size", 2880),
}
"""Per family: key and default of the number of experts, default of `num_experts_per_tok`, key and default of their width."""
TURNED = ("gpt_oss",)
"""Families with clamped experts, whose files have their matrices transposed, with rows of gate and up in turn."""


def experts_of(shape: Mapping[str, Any]) -> Experts | None:
    if shape["model_type"] not in EXPERTS:
        return None
    count_key, count, active, width_key, width = EXPERTS[shape["model_type"]]
    limits = float(shape.get("swiglu_limit") or 7.0), float(shape.get("swiglu_alpha") or 1.702)
    return Experts(
        count=int(shape.get(count_key) or shape.get("num_local_experts") or shape.get("num_experts") or count),
        active=int(shape.get("num_experts_per_tok") or active),
        ffn_size=int(shape.get(width_key) or width),
        normalised=shape["model_type"] in ("mixtral", "gpt_oss") or bool(shape.get("norm_topk_prob")),
        clamp=limits if shape["model_type"] in TURNED else None,
    )


def ffn_width(shape: Mapping[str, Any], *, active: bool = False) -> int:
    """Width of a layer's feed-forward, or of all its experts, or of those `active` for a token."""
    experts = experts_of(shape)
    if experts is None:
        return int(shape["intermediate_size"])
    return experts.ffn_size * (experts.active if active else experts.count)


def faults_of_experts(shape: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yield keys, values and the rules that these break."""
    if shape["model_type"] not in EXPERTS:
        return
    count_key, _, _, width_key, _ = EXPERTS[shape["model_type"]]
    wrong = False
    for key in dict.fromkeys((count_key, "num_local_experts", "num_experts", "num_experts_per_tok", width_key)):
        if shape.get(key) is not None and (type(shape[key]) is not int or shape[key] < 1):
            wrong = True
            yield key, shape[key], "be a positive integer"
    for key in ("swiglu_limit", "swiglu_alpha"):
        if shape.get(key) is not None and not is_positive(shape[key]):
            wrong = True
            yield key, shape[key], "be a positive number"
    experts = None if wrong else experts_of(shape)
    if experts is not None and experts.count == 1:
        yield count_key, 1, "be at least 2, because a single expert is a dense feed-forward"
    if experts is not None and experts.count > MOST_EXPERTS:
        yield count_key, experts.count, f"be at most {MOST_EXPERTS}, because a byte of a route names an expert"
    if experts is not None and experts.active > experts.count:
        yield "num_experts_per_tok", experts.active, f"be at most {experts.count}, the number of experts"
    for key, due in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if (shape.get(key) or due) != due:
            yield key, shape[key], f"be {due}, because layers without experts between others are not computed"


Region = tuple[int | slice, ...]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_APART = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
"""Names in files with a tensor per expert: of the block, and of gate, up and down."""


def tensors_apart(family: str, name: str, size: tuple[int, ...]) -> dict[str, Region]:
    """Names and regions of a tensor of transformers 5 in files with a tensor per expert, as Hugging Face's hub has them."""
    if family not in _APART or ".mlp." not in name:
        return {name: ()}
    (block, gate, up, down), layer = _APART[family], name[: name.index("mlp.")]
    if name.endswith("mlp.gate.weight"):
        return {f"{layer}{block}.gate.weight": ()}
    found: dict[str, Region] = {}
    for expert in range(size[0]):
        half, prefix = size[1] // 2, f"{layer}{block}.experts.{expert}"
        if name.endswith(DOWN):
            found[f"{prefix}.{down}.weight"] = (expert,)
        else:
            found[f"{prefix}.{gate}.weight"] = expert, slice(0, half)
            found[f"{prefix}.{up}.weight"] = expert, slice(half, 2 * half)
    return found


def size_apart(size: tuple[int, ...], region: Region) -> tuple[int, ...]:
    if not region:
        return size
    return (size[1] // 2 if len(region) > 1 else size[1], *size[2:])
