"""Transfers shares of Hugging Face tensors, and adapters of peft directories, to and from one rank's parameters."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.clock import by_time
from oppo_megatron.config.model import LoraConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.experts import size_apart, tensors_apart
from oppo_megatron.layout.hf_layout import (
    PEFT,
    SCALAR_HEAD,
    Head,
    Part,
    adapter_parts,
    adapter_problems,
    hf_tensors,
    param_shapes,
    size_of_rows,
    stage_parts,
    stored_names,
    summary,
)
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.weights.dist_source import DTYPES
from oppo_megatron.mcore.weights.hf_source import DrawnSource, OverlaidSource, SafetensorsSource, TensorSource, require_source
from oppo_megatron.mcore.weights.hf_writer import MAX_SHARD_BYTES, hf_config, peft_config, write_tensors
from oppo_megatron.modeldir.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from oppo_megatron.modeldir.headers import SINGLE_FILE


@torch.no_grad()
def load_weights(
    model: torch.nn.Module, shape: ModelShape, source: TensorSource,
    *, head: Head, tp_rank: int = 0, tp_size: int = 1, ep_size: int = 1, pp_rank: int = 0, pp_size: int = 1,
) -> None:  # fmt: skip
    """Fill a stage, reading only this rank's shares (`tp_rank`: or its number in the stage).

    Raises CheckpointError if they do not fit.
    """
    require_source(shape, source, head, "load_weights")
    parts = stage_parts(shape, head, tp_size=tp_size, ep_size=ep_size, pp_rank=pp_rank, pp_size=pp_size)
    params = matching_params(model, parts, tp_size)
    progress = by_time(is_owner=not dist.is_initialized() or dist.get_rank() == 0)
    for number, part in enumerate(parts):
        progress(f"{number} of {len(parts)} weights loaded")
        put_part(params[part.param], part, source.read(part.hf_name, part.share(tp_rank, tp_size)))


def export_weights(
    model: RoleModel | Sequence[RoleModel], directory: Path, *, settings: Mapping[str, Any] = MappingProxyType({}),
    base: Path | None = None, max_shard_bytes: int = MAX_SHARD_BYTES, extra_files: Iterable[Path] = (),
) -> None:  # fmt: skip
    """Write a Hugging Face directory (adapters: peft), whole or not at all, on every rank.

    `settings`: added to `config.json`; `base`: of the adapters, None if random.
    """
    chunks = [model] if isinstance(model, RoleModel) else model
    first = chunks[0]
    groups, dtype = first.groups, next(first.parameters()).dtype
    names = "config.json", SINGLE_FILE
    if first.adapters is None:
        config = {**hf_config(first.shape, first.head, dtype), **settings}
    else:
        config, names = peft_config(first.adapters, first.head, base), (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        max_shard_bytes = sys.maxsize
    if groups.copy_rank < groups.ep:
        values = _gathered(chunks)
        if groups.place == groups.pp_rank == 0:
            tensors = {part.hf_name: part.hf_shape for part in first.parts(1, 0, 1)}
            write_tensors(
                directory, *apart(first.shape, tensors, values), config, dtype,
                max_shard_bytes=max_shard_bytes, extra_files=extra_files, names=names,
            )  # fmt: skip
        for _ in values:  # the other ranks only take part
            pass
    dist.barrier(groups.all)


@torch.no_grad()
def _gathered(chunks: Sequence[RoleModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors on the model's first rank."""
    first, groups = chunks[0], chunks[0].groups
    pp_group, at_first = groups.collection.pp, groups.place == groups.pp_rank == 0
    stages = [first.parts(groups.tp, stage, first.num_stages, groups.ep) for stage in range(first.num_stages)]
    own = {chunk.stage: matching_params(chunk, stages[chunk.stage], groups.tp, whole=first.adapters is None) for chunk in chunks}
    like, seen = next(first.parameters()), set[str]()
    for stage, part in ((stage, part) for stage, parts in enumerate(stages) for part in parts):
        if part.hf_name in seen:  # a tied embedding is on two stages
            continue
        seen.add(part.hf_name)
        tensor, owner = None, stage % groups.pp
        if owner == groups.pp_rank and groups.place < part.shares(groups.tp):
            tensor = _over_ranks(take_part(own[stage][part.param], part), part, groups)
        if groups.place == 0 and owner > 0:
            if groups.pp_rank == owner:
                assert tensor is not None
                dist.send(tensor, dist.get_global_rank(pp_group, 0), group=pp_group)
            elif groups.pp_rank == 0:
                tensor = like.new_empty(part.hf_shape)
                dist.recv(tensor, dist.get_global_rank(pp_group, owner), group=pp_group)
        if at_first:
            assert tensor is not None
            yield part.hf_name, tensor


def _over_ranks(share: torch.Tensor, part: Part, groups: RoleGroups) -> torch.Tensor | None:
    """Return the tensor on a stage's first rank."""
    group, size = groups.collection.tp if part.ep == 1 else groups.experts, part.shares(groups.tp)
    if part.cut is None or size == 1:
        return share[: part.hf_shape[0]]
    shares = [torch.empty_like(share) for _ in range(size)] if groups.place == 0 else None
    dist.gather(share, shares, dst=dist.get_global_rank(group, 0), group=group)
    return torch.cat(shares, dim=part.cut)[: part.hf_shape[0]] if shares is not None else None


def rewrite_weights(
    shape: ModelShape, source: TensorSource, directory: Path, *, head: Head, dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES, extra_files: Iterable[Path] = (),
) -> None:  # fmt: skip
    """Write a directory; `dtype` defaults to the narrowest exact one."""
    tensors, out = hf_tensors(shape, head), dtype or common_dtype(shape, source, head)
    values = ((name, source.read(name, tuple(map(slice, size)))) for name, size in tensors.items())
    write_tensors(
        directory, *apart(shape, tensors, values), hf_config(shape, head, out), out,
        max_shard_bytes=max_shard_bytes, extra_files=extra_files,
    )  # fmt: skip


def apart(
    shape: ModelShape, tensors: Mapping[str, tuple[int, ...]], values: Iterable[tuple[str, torch.Tensor]]
) -> tuple[dict[str, tuple[int, ...]], Iterator[tuple[str, torch.Tensor]]]:
    """Return sizes and values as files have them: with a tensor per expert, and projections joined."""
    parts = {name: tensors_apart(shape.family, name, size) for name, size in tensors.items()}
    sizes = {part: size_apart(tensors[name], region) for name, found in parts.items() for part, region in found.items()}
    each = ((part, value[region]) for name, value in values for part, region in parts[name].items())
    joined = stored_names(shape, sizes)

    def together() -> Iterator[tuple[str, torch.Tensor]]:
        for name, names in joined.items():
            found = [value for _, value in itertools.islice(each, len(names))]
            yield name, found[0] if len(found) == 1 else torch.cat(found)

    return {name: size_of_rows([sizes[part] for part in names]) for name, names in joined.items()}, together()


def common_dtype(shape: ModelShape, source: TensorSource, head: Head) -> torch.dtype:
    return functools.reduce(torch.promote_types, {DTYPES[source.tensors[name].dtype] for name in hf_tensors(shape, head)})


def put_part(param: torch.Tensor, part: Part, share: torch.Tensor) -> None:
    """Store a tensor's share in the parameter's rows, zero-padded."""
    first, share = 0, part.as_param(share)
    for rows in part.rows:
        piece = share[first : first + rows.stop - rows.start]
        param[rows.start : rows.start + len(piece)].copy_(piece)
        param[rows.start + len(piece) : rows.stop].zero_()
        first += len(piece)


def take_part(param: torch.Tensor, part: Part) -> torch.Tensor:
    filed: torch.Tensor = part.as_filed(torch.cat([param[rows] for rows in part.rows]))
    return filed


def matching_params(model: torch.nn.Module, parts: list[Part], tp_size: int, whole: bool = True) -> dict[str, torch.nn.Parameter]:
    """Return parameters filled by `parts`; `whole`: all."""
    filled = {part.param for part in parts}
    params = {name: param for name, param in model.named_parameters() if whole or name in filled}
    expected, found = param_shapes(parts, tp_size), {name: tuple(p.shape) for name, p in params.items()}
    if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
        lines = "".join(f"\n  - {name}: model {found.get(name)}, layout {expected.get(name)}" for name in wrong)
        raise CheckpointError(
            f"the model's parameters do not fit its shape and head:{lines}\n"
            "Build the model from the same shape, head and parallel sizes."
        )
    return params


class FreshAdapters(DrawnSource):
    """Initial adapters: A uniform within 1 / sqrt(inputs), as in peft; B zero."""

    def __init__(self, parts: Collection[Part], seed: int):
        super().__init__({part.hf_name: part.hf_shape for part in parts if ".lora_" in part.hf_name}, seed)

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)


def open_adapters(directory: Path, shape: ModelShape, lora: LoraConfig, head: Head) -> TensorSource:
    """Return a peft directory's tensors.  Raises CheckpointError unless they fit."""
    source = SafetensorsSource(directory, ADAPTER_WEIGHTS)
    if problems := adapter_problems(shape, lora, head, source.tensors):
        raise CheckpointError(f"{directory}: the adapters do not fit the model:\n{summary(problems)}")
    return source


def has_head(directory: Path) -> bool:
    return f"{PEFT}{SCALAR_HEAD}" in SafetensorsSource(directory, ADAPTER_WEIGHTS).tensors


@torch.no_grad()
def fill_adapters(model: Any, lora: LoraConfig, seed: int) -> None:
    source: TensorSource
    if lora.adapter is None:
        source = FreshAdapters(adapter_parts(model.shape, lora, model.head), seed)
    else:
        source = open_adapters(lora.adapter, model.shape, lora, model.head)
    tp = model.groups.tp
    parts = adapter_parts(model.shape, lora, model.head, tp_size=tp, pp_rank=model.stage, pp_size=model.num_stages)
    params = matching_params(model, parts, tp, whole=False)
    for part in parts:
        if part.hf_name in source.tensors:
            put_part(params[part.param], part, source.read(part.hf_name, part.share(model.groups.tp_rank, tp)))


class MergedSource(OverlaidSource):
    """Adapted weights are W + s B A; a scalar head is the adapters'."""

    def __init__(self, base: TensorSource, adapters: TensorSource, scale: float):
        head = PEFT + SCALAR_HEAD
        super().__init__(base, {SCALAR_HEAD: (adapters, head)} if head in adapters.tensors else {})
        self._adapters, self._scale = adapters, scale

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        weight, pair = super().read(name, region), PEFT + name.removesuffix("weight")
        if f"{pair}lora_A.weight" not in self._adapters.tensors:
            return weight
        a, b = (self._adapters.read(f"{pair}lora_{m}.weight", (slice(None), slice(None))).float() for m in "AB")
        return (weight.float() + (b @ a)[region] * self._scale).to(weight.dtype)


def merged(base: TensorSource, shape: ModelShape, head: Head, lora: LoraConfig) -> MergedSource:
    """Merge `lora.adapter`.  Raises CheckpointError if it does not fit."""
    assert lora.adapter is not None
    adapters = open_adapters(lora.adapter, shape, lora, head)
    return MergedSource(base, adapters, lora.scale)
