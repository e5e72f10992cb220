"""Which libraries' layers, norms, optimizers and attention are taken, for every set of libraries that a machine may have."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from oppo_megatron.layout.kernels import Available, find_available, import_fault, kernel_table, layer_kind, layer_problem, usable

NGC = Available(transformer_engine="2.12.0", apex="0.1", flash_attn="2.8.3", cuda=True)


def table(available: Available) -> dict[str, tuple[str, str | None]]:
    return {kernels.part: (kernels.used, kernels.lacking) for kernels in kernel_table(available)}


def test_the_table_names_what_is_used_and_what_is_missing() -> None:
    found = table(NGC)
    assert found["layers and norms"] == ("transformer-engine 2.12.0", None)
    assert found["Adam"] == found["gradient norm"] == ("fused, of transformer-engine 2.12.0", None)
    assert "flash-attn 2.8.3 with block tables" in found["attention"][0]
    found = table(Available(apex="0.1", cuda=True))
    assert found["Adam"] == found["gradient norm"] == ("fused, of apex 0.1", None)
    assert found["layers and norms"][1] == "transformer-engine's: transformer-engine is not installed"
    found = table(Available())
    assert found["Adam"] == ("fused, of torch", None) and "CUDA devices only" in str(found["layers and norms"][1])
    assert found["gradient norm"][1] == "fused: it computes on CUDA devices only"
    found = table(Available(cuda=True))
    assert found["gradient norm"][1] == "fused: transformer-engine is not installed, and NVIDIA's apex is not installed"
    lacking = "block tables: flash-attn is not installed, triton is not installed"
    assert found["attention"] == ("torch's, over dense KV caches", lacking)
    found = table(Available(cuda=True, triton="3.6.0"))
    assert found["attention"][0].startswith("a kernel of this package by triton 3.6.0 with block tables")


@pytest.mark.parametrize("te,cuda,adapters", list(product([None, "2.0"], [True, False], [True, False])))
def test_auto_takes_transformer_engine_where_it_can(te: str | None, cuda: bool, adapters: bool) -> None:
    available = Available(transformer_engine=te, cuda=cuda)
    possible = te is not None and cuda and not adapters
    assert (layer_kind(available, adapters=adapters) == "transformer_engine") == possible
    assert (layer_problem(available, adapters=adapters) is None) == possible


BROKEN = {
    "flash-attn 4": ("flash_attn", {"flash_attn/cute/__init__.py": ""}, "flash_attn is {folder}/flash_attn, without it"),
    "built for another torch": (
        "flash_attn", {"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')"},
        "ImportError: undefined symbol",
    ),
    "PyPI's apex": ("apex", {"apex/__init__.py": ""}, "No module named 'apex.optimizers'"),
    "apex without kernels": ("apex", {"apex/optimizers.py": "class FusedAdam: pass"}, "No module named 'amp_C'"),
    "transformer-engine without its compiled half": (
        "transformer_engine", {"transformer_engine/__init__.py": "raise RuntimeError('Found empty meta package')"},
        "RuntimeError: Found empty",
    ),
}  # fmt: skip
"""Packages that are found, with the files that they have, and what is said of them."""


@pytest.mark.parametrize("case", BROKEN)
def test_a_package_without_the_functions_that_are_used_is_left_aside_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    package, files, said = BROKEN[case]
    library = package.replace("_", "-")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in (package, "amp_C")]:
        monkeypatch.delitem(sys.modules, name)
    import_fault.cache_clear()
    try:
        assert find_spec(package) is not None
        with pytest.warns(UserWarning, match=f"{library} cannot be used: .*; the run continues without it"):
            assert not usable(library)
        available = find_available(True)
        assert getattr(available, package) is None and said.format(folder=tmp_path) in available.fault(library)
        assert any(available.fault(library) in str(kernels.lacking) for kernels in kernel_table(available))
        assert find_available(False) == Available(), "without a CUDA device nothing is asked"
    finally:
        import_fault.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def test_what_can_be_imported_is_found() -> None:
    available = find_available(True, lambda *names: None)
    assert available.transformer_engine and available.apex and available.flash_attn and available.triton and not available.faults
    assert import_fault("json:loads") is None and import_fault("json") is None
    assert import_fault("no_such_package.at:all") == "is not installed"
