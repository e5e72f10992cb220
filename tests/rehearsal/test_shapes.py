"""Kept shapes are those that torch's fake tensors would say again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.rehearsal.shapes import Shapes

ops = torch.ops.aten


@pytest.fixture
def shapes() -> Shapes:
    return Shapes({})


def fake(shapes: Shapes, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    with shapes.mode:
        return torch.empty(shape, dtype=dtype, device=device)


def described(out: Any) -> Any:
    return tree_map_only(Tensor, of_one, out)


def of_one(x: Any) -> tuple[Any, ...]:
    placed = tuple(x.shape), x.stride(), x.storage_offset(), x.untyped_storage().nbytes()
    return *placed, x.dtype, x.fake_device, x.is_inference()


CALLS: dict[str, Callable[[Shapes], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "new": lambda s: (ops.mm.default, (fake(s, 3, 4), fake(s, 4, 5)), {}),
    "by a whole number": lambda s: (ops.add.Tensor, (fake(s, 3, dtype=torch.int64), 1), {}),
    "by a fraction": lambda s: (ops.add.Tensor, (fake(s, 3, dtype=torch.int64), 1.0), {}),
    "by a truth": lambda s: (ops.add.Tensor, (fake(s, 3, dtype=torch.bool), True), {}),
    "a view": lambda s: (ops.slice.Tensor, (fake(s, 6, 4), 0, 2, 6, 2), {}),
    "views": lambda s: (ops.split_with_sizes.default, (fake(s, 6, 4), [1, 5]), {}),
    "a view of a view": lambda s: (ops.t.default, (s.run(ops.slice.Tensor, (fake(s, 6, 4), 0, 2), {}),), {}),
    "of another type": lambda s: (ops.view.dtype, (fake(s, 4, dtype=torch.float32), torch.int32), {}),
    "to the host": lambda s: (ops._to_copy.default, (fake(s, 4),), {"device": torch.device("cpu")}),
    "a tensor of the host": lambda s: (ops.index.Tensor, (fake(s, 4), [torch.tensor([2, 0])]), {}),
    "made": lambda s: (ops.zeros.default, ([2, 3],), {"device": torch.device("cuda", 0)}),
    "several": lambda s: (ops.topk.default, (fake(s, 3, 9), 2), {}),
    "in strides": lambda s: (ops.mul.Tensor, (s.run(ops.t.default, (fake(s, 3, 9),), {}), 2), {}),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_second_time_is_as_the_first(shapes: Shapes, name: str, inference: bool) -> None:
    calls = [CALLS[name](shapes) for _ in range(2)]
    with torch.inference_mode(inference):
        first = described(shapes.run(*calls[0]))
        assert any(shapes.found.values())
        shapes._work_out = None  # type: ignore[method-assign, assignment]
        assert described(shapes.run(*calls[1])) == first


def test_numbers_of_other_kinds_are_other_calls(shapes: Shapes) -> None:
    whole = fake(shapes, 3, dtype=torch.int64)
    types = [shapes.run(ops.add.Tensor, (whole, number), {}).dtype for number in (1, 1.0, True)]
    assert types == [torch.int64, torch.float32, torch.int64] and len(shapes.found) == 3


def test_a_tensor_of_another_kind_is_another_call(shapes: Shapes) -> None:
    base = fake(shapes, 3, 3)
    others = [fake(shapes, 3, 3, dtype=torch.int32), fake(shapes, 3, 3, device="cpu"), fake(shapes, 4, 3)]
    turned = shapes.run(ops.t.default, (base,), {})
    said = [of_one(shapes.run(ops.neg.default, (each,), {})) for each in (base, *others, turned)]
    with torch.inference_mode():
        said.append(of_one(shapes.run(ops.neg.default, (base,), {})))
    assert len(set(said)) == len(said)
