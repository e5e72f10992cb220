"""Products with laid-out weights: alike for any number of rows, whichever way each number takes."""

from __future__ import annotations

import pytest
import torch

from oppo_megatron.layout.cpu_kernels import FEW_ROWS, MOST_ROWS, ROW_MULTIPLE
from oppo_megatron.mcore.cpu import IN_PLACE_ROWS, can_prepack, product

ROWS = [1, IN_PLACE_ROWS, IN_PLACE_ROWS + 1, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS + ROW_MULTIPLE, MOST_ROWS, MOST_ROWS + 1]


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_every_number_of_rows_gives_the_plain_product(
    dtype: torch.dtype, tolerance: float, biased: bool, intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo_megatron.mcore.cpu.by_intel", lambda: intel)
    generator = torch.Generator().manual_seed(0)
    weight_OI, bias_O = (torch.randn(size, generator=generator).to(dtype) for size in ((40, 24), (40,)))
    if not can_prepack(weight_OI):
        pytest.skip(
            f"oneDNN lays out no weights of {dtype} here; bfloat16 takes a processor with AVX-512 (avx512bw, vl, dq)"
        )
    multiply = product(weight_OI, bias_O if biased else None, packed=True)
    for rows in ROWS:
        x_TI = torch.randn(rows, 24, generator=generator).to(dtype)
        expected = x_TI.double() @ weight_OI.double().T + (bias_O.double() if biased else 0)
        found = multiply(x_TI)
        assert found.shape == expected.shape and found.dtype == dtype
        assert (found - expected).abs().max() < tolerance * expected.abs().max(), rows
