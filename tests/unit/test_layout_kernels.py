"""Which libraries' layers, norms, optimizers and attention are taken, for every set of libraries that a machine may have."""

from __future__ import annotations

from itertools import product

import pytest

from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.layout.kernels import Available, find_available, kernel_table, layer_kind, layer_problem
from oppo_megatron.preflight.settings import check_layers

NGC = Available(transformer_engine="2.12.0", apex="0.1", flash_attn="2.8.3", cuda=True)


def table(available: Available) -> dict[str, tuple[str, str | None]]:
    return {kernels.part: (kernels.used, kernels.lacking) for kernels in kernel_table(available)}


def test_an_ngc_container_has_everything_fused() -> None:
    found = table(NGC)
    assert found["layers and norms"] == ("transformer-engine 2.12.0", None)
    assert found["Adam"] == found["gradient norm"] == ("fused, of transformer-engine 2.12.0", None)
    assert "flash-attn 2.8.3 with block tables" in found["attention"][0]
    assert layer_kind("auto", NGC, adapters=False) == "transformer_engine"


def test_apex_alone_gives_adam_and_norms_of_gradients() -> None:
    found = table(Available(apex="0.1", cuda=True))
    assert found["Adam"] == found["gradient norm"] == ("fused, of apex 0.1", None)
    assert found["layers and norms"][1] == "transformer-engine's: transformer-engine is not installed"


def test_nothing_installed_names_what_is_missing() -> None:
    found = table(Available())
    assert found["Adam"] == ("fused, of torch", None)
    assert "CUDA devices only" in str(found["layers and norms"][1])
    assert "PyPI's is not NVIDIA's" in str(table(Available(other_apex=True))["gradient norm"][1])


@pytest.mark.parametrize("te,cuda,adapters", list(product([None, "2.0"], [True, False], [True, False])))
def test_auto_takes_transformer_engine_where_it_can(te: str | None, cuda: bool, adapters: bool) -> None:
    available = Available(transformer_engine=te, cuda=cuda)
    possible = te is not None and cuda and not adapters
    assert (layer_kind("auto", available, adapters=adapters) == "transformer_engine") == possible
    assert (layer_problem(available, adapters=adapters) is None) == possible
    assert layer_kind("torch", available, adapters=adapters) == "torch"


def test_asked_for_by_name_it_must_be_there() -> None:
    (problem,) = check_layers(RuntimeConfig(layers="transformer_engine", device="cpu"), adapters=False)
    assert "CUDA devices only; set it to auto or torch" in problem
    (problem,) = check_layers(RuntimeConfig(layers="transformer_engine", device="cuda"), adapters=False)
    assert "is not installed" in problem
    assert check_layers(RuntimeConfig(), adapters=True) == []


def test_what_is_importable_is_found_and_pypis_apex_is_told_from_nvidias() -> None:
    assert find_available(False, lambda name: False) == Available()
    assert find_available(True, lambda name: name == "apex").other_apex
    nvidias = find_available(True, lambda name: name in ("apex", "amp_C", "transformer_engine"))
    assert not nvidias.other_apex and nvidias.apex and nvidias.transformer_engine
