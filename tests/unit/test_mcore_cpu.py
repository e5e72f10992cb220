"""Kernels of a CPU: products with packed weights, cuts between sequences that attend together, undocumented operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import FEW_ROWS, MOST_ROWS, ROW_MULTIPLE
from oppo_megatron.mcore import cpu
from oppo_megatron.mcore.cpu import IN_PLACE_ROWS, blocks, can_prepack, product, require_private_ops

ROWS = [1, IN_PLACE_ROWS, IN_PLACE_ROWS + 1, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS + ROW_MULTIPLE, MOST_ROWS, MOST_ROWS + 1]


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_number_of_rows_gives_the_plain_product(
    dtype: torch.dtype, tolerance: float, biased: bool, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "by_intel", lambda: intel)
    generator = torch.Generator().manual_seed(0)
    weight_OI, bias_O = (torch.randn(size, generator=generator).to(dtype) for size in ((40, 24), (40,)))
    if not can_prepack(weight_OI):
        pytest.skip(f"oneDNN lays out no weights of {dtype} here; bfloat16 takes a processor with AVX-512 (avx512bw, vl, dq)")
    multiply = product(weight_OI, bias_O if biased else None, packed=True)
    for rows in ROWS:
        x_TI = torch.randn(rows, 24, generator=generator).to(dtype)
        expected = x_TI.double() @ weight_OI.double().T + (bias_O.double() if biased else 0)
        found = multiply(x_TI)
        assert found.shape == expected.shape and found.dtype == dtype
        assert (found - expected).abs().max() < tolerance * expected.abs().max(), rows


def stretches(lengths: list[int], call: float) -> list[slice]:
    return blocks([(length,) for length in lengths], call)


LENGTHS = st.lists(st.integers(0, 600), min_size=1, max_size=40)


def cost(parts: list[slice], lengths: list[int], call: float) -> float:
    return sum(len(lengths[part]) * max(lengths[part]) + call for part in parts)


@given(LENGTHS, st.floats(1, 5000))
def test_rows_keep_their_order_and_are_cut_where_it_pays(lengths: list[int], call: float) -> None:
    parts, whole = stretches(lengths, call), slice(0, len(lengths))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert cost(parts, lengths, call) < cost([whole], lengths, call) or parts == [whole]
    for part in parts:
        for middle in range(part.start + 1, part.stop):
            halves = [slice(part.start, middle), slice(middle, part.stop)]
            assert cost(halves, lengths, call) >= cost([part], lengths, call) - 1e-6


def test_carried_sequences_are_cut_from_new_ones() -> None:
    assert stretches([360, 352, 340, 70, 70, 70, 64, 64], 100) == [slice(0, 3), slice(3, 8)]
    assert stretches([70] * 8, 1) == [slice(0, 8)]
    assert stretches([1, 600], float("inf")) == [slice(0, 2)]
    assert stretches([5], 1) == [slice(0, 1)]


def test_each_missing_operation_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_private_ops({"float32", "bfloat16"})  # this torch has them all
    monkeypatch.setattr(cpu, "PACKING", ("mkldnn._linear_pointwise", "mkldnn._gone"))
    monkeypatch.setattr(cpu, "HALF_ATTENTION", ("aten._gone_too",))
    with pytest.raises(ConfigError) as found:
        require_private_ops({"bfloat16"})
    packing, attention = found.value.problems
    assert packing.startswith("decoding on a CPU calls torch.ops.mkldnn._gone, which torch ")
    assert "bfloat16 on a CPU calls torch.ops.aten._gone_too" in attention and "runtime.dtype to float32" in attention
