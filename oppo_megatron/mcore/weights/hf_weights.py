"""Transfers weights between Hugging Face tensors and one rank's parameters, one tensor's share at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from oppo_megatron.clock import by_time
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import Head, Part, hf_tensors, param_shapes, stage_parts
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.weights.hf_source import TensorSource, require_source
from oppo_megatron.mcore.weights.hf_writer import MAX_SHARD_BYTES, hf_config, write_tensors


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    shape: ModelShape,
    source: TensorSource,
    *,
    head: Head,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
) -> None:
    """Fill every parameter of one stage in place, before DDP and optimizer, reading only this rank's shares.

    Raises CheckpointError if source or model do not fit `shape`.
    """
    require_source(shape, source, head, "load_weights")
    parts = stage_parts(shape, head, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)
    params = matching_params(model, parts, tp_size)
    progress = by_time(is_owner=not dist.is_initialized() or dist.get_rank() == 0)
    for number, part in enumerate(parts):
        progress(f"{number} of {len(parts)} weights loaded")
        put_part(params[part.param], part, source.read(part.hf_name, part.share(tp_rank, tp_size)))


def export_weights(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    shape: ModelShape,
    directory: Path,
    *,
    head: Head,
    tp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
    dp_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Iterable[Path] = (),
) -> None:
    """Write the model as a Hugging Face directory, whole or not at all; every rank of the model makes the call.

    `model`: this rank's stage or chunks.  Groups of size one may be None; `dtype` defaults to the parameters'.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    out = dtype or next(chunks[0].parameters()).dtype

    def parts_of(tp_size: int, stage: int, num_stages: int) -> list[Part]:
        return stage_parts(shape, head, tp_size=tp_size, pp_rank=stage, pp_size=num_stages)

    def write(values: Values) -> None:
        write_tensors(
            directory, hf_tensors(shape, head), values, hf_config(shape, head, out), out,
            max_shard_bytes=max_shard_bytes, extra_files=extra_files,
        )  # fmt: skip

    write_gathered(chunks, parts_of, write, tp_group, pp_group, dp_group)


Values = Iterator[tuple[str, torch.Tensor]]
PartsOf = Callable[[int, int, int], list[Part]]
"""(tensor ranks, stage, stages) -> the parts of the stage."""


def write_gathered(
    chunks: Sequence[torch.nn.Module],
    parts_of: PartsOf,
    write: Callable[[Values], None],
    tp_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    *,
    whole: bool = True,
) -> None:
    """Collect a model's parts on its first rank, tensor by tensor, for `write`; every rank makes the call.

    `whole`: the parts are all parameters.
    """
    if _place(dp_group)[0] == 0:
        values = _gathered(chunks, parts_of, tp_group, pp_group, whole)
        if _place(tp_group)[0] == _place(pp_group)[0] == 0:
            write(values)
        for _ in values:  # the other ranks only take part
            pass
    for group in (pp_group, tp_group, dp_group):
        if group is not None:
            dist.barrier(group)


@torch.no_grad()
def _gathered(
    chunks: Sequence[torch.nn.Module],
    parts_of: PartsOf,
    tp_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup | None,
    whole: bool,
) -> Values:
    (tp_rank, tp_size), (pp_rank, pp_size) = _place(tp_group), _place(pp_group)
    num_stages = pp_size * len(chunks)
    stages = [parts_of(tp_size, stage, num_stages) for stage in range(num_stages)]
    own = {  # by virtual stage
        stage: matching_params(chunk, stages[stage], tp_size, whole=whole)
        for stage, chunk in zip(range(pp_rank, num_stages, pp_size), chunks, strict=True)
    }
    like, seen = next(chunks[0].parameters()), set[str]()
    for stage, part in ((stage, part) for stage, parts in enumerate(stages) for part in parts):
        if part.hf_name in seen:  # a tied embedding is on two stages
            continue
        seen.add(part.hf_name)
        tensor, owner = None, stage % pp_size
        if owner == pp_rank:
            tensor = _over_tensor_ranks(take_part(own[stage][part.param], part), part, tp_group)
        if tp_rank == 0 and owner > 0:
            assert pp_group is not None
            if pp_rank == owner:
                assert tensor is not None
                dist.send(tensor, dist.get_global_rank(pp_group, 0), group=pp_group)
            elif pp_rank == 0:
                tensor = like.new_empty(part.hf_shape)
                dist.recv(tensor, dist.get_global_rank(pp_group, owner), group=pp_group)
        if tp_rank == pp_rank == 0:
            assert tensor is not None
            yield part.hf_name, tensor


def _over_tensor_ranks(share: torch.Tensor, part: Part, tp_group: dist.ProcessGroup | None) -> torch.Tensor | None:
    rank, size = _place(tp_group)
    if size == 1 or part.cut is None:
        return share[: part.hf_shape[0]] if rank == 0 else None
    shares = [torch.empty_like(share) for _ in range(size)] if rank == 0 else None
    assert tp_group is not None
    dist.gather(share, shares, dst=dist.get_global_rank(tp_group, 0), group=tp_group)
    return torch.cat(shares, dim=part.cut)[: part.hf_shape[0]] if shares is not None else None


def rewrite_weights(
    shape: ModelShape,
    source: TensorSource,
    directory: Path,
    *,
    head: Head,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Iterable[Path] = (),
) -> None:
    """Write a source as a Hugging Face directory; `dtype` defaults to the narrowest exact one."""
    tensors, out = hf_tensors(shape, head), dtype or common_dtype(shape, source, head)
    values = ((name, source.read(name, tuple(map(slice, size)))) for name, size in tensors.items())
    write_tensors(
        directory, tensors, values, hf_config(shape, head, out), out,
        max_shard_bytes=max_shard_bytes, extra_files=extra_files,
    )  # fmt: skip


def common_dtype(shape: ModelShape, source: TensorSource, head: Head) -> torch.dtype:
    dtypes = [found for name in hf_tensors(shape, head) if (found := source.dtype(name)) is not None]
    return functools.reduce(torch.promote_types, dtypes)


def put_part(param: torch.Tensor, part: Part, share: torch.Tensor) -> None:
    """Store a rank's share of a tensor in its rows of the parameter, zero-padded."""
    first = 0
    for rows in part.rows:
        piece = share[first : first + rows.stop - rows.start]
        param[rows.start : rows.start + len(piece)].copy_(piece)
        param[rows.start + len(piece) : rows.stop].zero_()
        first += len(piece)


def take_part(param: torch.Tensor, part: Part) -> torch.Tensor:
    """The inverse of `put_part`, padding included."""
    return torch.cat([param[rows] for rows in part.rows])


def matching_params(
    model: torch.nn.Module, parts: list[Part], tp_size: int, *, whole: bool = True
) -> dict[str, torch.nn.Parameter]:
    """Return the checked parameters that `parts` fill; `whole`: there are no others."""
    filled = {part.param for part in parts}
    params = {name: param for name, param in model.named_parameters() if whole or name in filled}
    expected, found = param_shapes(parts, tp_size), {name: tuple(p.shape) for name, p in params.items()}
    if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
        lines = "".join(f"\n  - {name}: model {found.get(name)}, layout {expected.get(name)}" for name in wrong)
        raise CheckpointError(
            f"the model's parameters are not those of its shape and head:{lines}\n"
            "Build the model from the same shape, head and parallel sizes."
        )
    return params


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())
