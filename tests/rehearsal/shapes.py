"""Shapes of operations' results, computed once by torch's fake tensors (most of a millisecond each), then kept.
A rank's results (`Shapes.found`) can be pickled for ranks that are forked later."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

PLAIN = (int, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


class NotKept(Exception):
    """A call, or what comes of it, that a few numbers do not describe."""


class Same(NamedTuple):
    """An output that is the call's tensor of this number."""

    tensor: int


class Made(NamedTuple):
    """An output that is new, in the memory of the call's tensor `view_of` or in one of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    inference: bool
    view_of: int | None


Outputs = tuple[Any, tuple[Any, ...]]  # the type of the whole (None: a single one), and each
Kept = Mapping[Hashable, Outputs | None]  # None: not to be kept


class Shapes:
    def __init__(self, kept: Kept):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False
        self._kept = kept
        self.found: dict[Hashable, Outputs | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        try:
            key = _call(func, args, kwargs, tensors)
        except NotKept:
            return self._work_out(func, args, kwargs)
        known = self._kept.get(key) or self.found.get(key)
        if known is not None:
            whole, outputs = known
            made = [self._make(each, tensors) for each in outputs]
            return made[0] if whole is None else whole(made)
        out = self._work_out(func, args, kwargs)
        if key not in self._kept and key not in self.found:
            changes_a_shape = _call(func, args, kwargs, []) != key
            self.found[key] = None if changes_a_shape else _outputs(out, tensors)
        return out

    def _work_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.mode:
            shaped_args, shaped_kwargs = tree_map(_shaped, (args, kwargs))
            return func(*shaped_args, **shaped_kwargs)

    def _make(self, output: Any, tensors: list[Tensor]) -> Any:
        if type(output) is Same:
            return tensors[output.tensor]
        if type(output) is not Made:
            return output
        shape, stride, offset, dtype, device, inference, view_of = output
        with torch.inference_mode(inference):  # in a view of another tensor it need not be the mode of the call
            if view_of is None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                memory = tensors[view_of].untyped_storage()
                made = torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, shape, stride)
            return FakeTensor(self.mode, made, device)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


def _shaped(value: Any) -> Any:
    """A fake tensor in the place of a tensor of the CPU; it forgets its numbers."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _call(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Hashable:
    told = _told(args, tensors), *((name, _told(value, tensors)) for name, value in kwargs.items())
    return func.name(), torch.is_inference_mode_enabled(), told


def _told(value: Any, tensors: list[Tensor]) -> Hashable:
    """An argument, without the numbers in a tensor; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        first = next(number for number, each in enumerate(tensors) if each is value)
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        placed = value.stride(), value.storage_offset(), value.is_inference()
        return first, tuple(value.shape), *placed, value.dtype, device
    if isinstance(value, list | tuple):
        return "several", *(_told(each, tensors) for each in value)
    if isinstance(value, bool | float):  # equal to an integer, which gives another type
        return type(value).__name__, value
    if isinstance(value, PLAIN):
        return value
    raise NotKept


def _outputs(out: Any, tensors: list[Tensor]) -> Outputs | None:
    several = isinstance(out, list | tuple)
    try:
        each = tuple(_output(x, tensors) for x in (out if several else [out]))
    except NotKept:
        return None
    memories = [_memory(x) for x in leaves(out) if isinstance(x, Tensor)]
    fresh = sum(type(x) is Made and x.view_of is None for x in each)
    if fresh and len(set(memories)) < len(memories):
        return None
    return (list if isinstance(out, list) else tuple) if several else None, each


def _output(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, Tensor):
        if isinstance(value, int | float | None):
            return value
        raise NotKept
    for number, each in enumerate(tensors):
        if each is value:
            return Same(number)
    if not isinstance(value, FakeTensor) or value.dtype.is_complex:
        raise NotKept
    memory = _memory(value)
    view_of = next((number for number, each in enumerate(tensors) if _memory(each) == memory), None)
    shape, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
    if view_of is None:
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if value.numel() else 0
        if offset or value.untyped_storage().nbytes() != reach * value.dtype.itemsize:
            raise NotKept
    return Made(shape, stride, offset, value.dtype, value.fake_device, value.is_inference(), view_of)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
