"""The Python of transformer-engine, flash-attn, Triton and apex, as this package and megatron-core call it, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpulibs"
FETCHED = "`make test-gpulibs` fetches it and runs this"
CLONED = f"put NVIDIA's source there (git clone https://github.com/NVIDIA/apex {FOLDER / 'apex'}), then `make test-gpulibs`"
REMEDIES = {"transformer_engine": FETCHED, "flash_attn": FETCHED, "triton": FETCHED, "apex": CLONED}
KINDS = ("qwen2", "llama", "qwen3")  # a bias, none, and norms of queries and keys


def needed(library: str) -> Path:
    if not (FOLDER / library / library / "__init__.py").is_file():
        pytest.skip(f"no Python of {library} in {FOLDER / library}: {REMEDIES[library]}")
    return FOLDER / library


def run(module: str, *arguments: object, library: Path | None = None, beside: Path | None = None) -> None:
    """A job in a process of its own, where the libraries are found before any other."""
    path = python_path(*(part for part in (library, beside, ROOT) if part is not None))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.gpulibs.{module}", *map(str, arguments)], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def farthest(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float((one.float() - other.float()).abs().max())


@pytest.fixture(scope="module")
def transformer_engine() -> Path:
    return needed("transformer_engine")


def test_transformer_engines_parameters_are_those_of_torchs_layers(transformer_engine: Path, tmp_path: Path) -> None:
    run("te_jobs", "shards", tmp_path / "found.pt", library=transformer_engine)
    found = torch.load(tmp_path / "found.pt")
    for kind in KINDS:
        for shared in (False, True):
            theirs = found[f"{kind}, sequence parallel {shared}, transformer_engine"]
            assert theirs == found[f"{kind}, sequence parallel {shared}, torch"]
            shape, dtype, device, sharded, dim, stride, _, _ = theirs["decoder.layers.0.mlp.linear_fc1.weight"]
            assert (shape, dtype, device, sharded, dim, stride) == ((64, 32), "torch.bfloat16", "cpu", True, 0, 2)
            *_, reduced, _ = theirs["decoder.layers.0.input_layernorm.weight"]
            assert bool(reduced) is shared, "gradients of norms are summed over the tensor ranks"


def test_a_model_of_transformer_engines_layers_computes_what_torchs_does(transformer_engine: Path, tmp_path: Path) -> None:
    run("te_jobs", "outputs", tmp_path / "found.pt", library=transformer_engine)
    found = torch.load(tmp_path / "found.pt")
    assert found["calls"] == ["Linear(inp, is_first_microbatch)", "RMSNorm(input)"]
    for kind in KINDS:
        assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= set(found[f"{kind}, transformer_engine, modules"])
        ours, theirs = found[f"{kind}, torch"], found[f"{kind}, transformer_engine"]
        assert torch.equal(theirs["fused"], ours["fused"])
        for path in ("whole", "module"):
            assert farthest(theirs[path], ours[path]) < 1e-4 < float(ours[path].abs().max())


@pytest.mark.parametrize(("size", "kernels"), [(2, "flash-attn"), (3, "flash-attn"), (3, "cuDNN")])
def test_transformer_engines_ring_computes_what_gathered_keys_do(
    size: int, kernels: str, transformer_engine: Path, tmp_path: Path
) -> None:
    run("ring_job", tmp_path, size, kernels, library=transformer_engine, beside=needed("flash_attn"))
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt")
        by_ring = {"no window", "a wide window"}
        for name, gathered in found["gathered"].items():
            assert (found["sent"][name] == 2 * size - 1) is (name in by_ring) and (name in by_ring or not found["sent"][name])
            told = [text for text in found["warned"][name] if text.startswith("transformer-engine")]
            assert len(told) == (name == "no kernel") and all("backend is available" in text for text in told)
            for ours, theirs in zip(gathered, found["ring"][name], strict=True):  # 0.008: two steps of float16 from 4 to 8
                assert farthest(ours, theirs) <= (0.008 if name in by_ring else 0) < 1 < float(ours.abs().max())


@pytest.mark.parametrize("library", ["transformer_engine", "apex"])
def test_updates_by_a_fused_adam_are_those_of_torchs(library: str, tmp_path: Path) -> None:
    run("optimizer_job", library, tmp_path, library=needed(library))
    run("optimizer_job", "torch", tmp_path)
    theirs, ours = (torch.load(tmp_path / f"{name}.pt") for name in (library, "torch"))
    given: dict[str, Any] = theirs["constructed"][0]
    assert given == {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": True}
    for dtype in ("float32", "bfloat16"):
        fused, plain = theirs[dtype], ours[dtype]
        assert (fused["optimizer"], plain["optimizer"]) == (f"{library}.FusedAdam", "torch.AdamW")
        assert fused["norms"] == pytest.approx(plain["norms"], rel=1e-4) and min(plain["norms"]) > 0.5, "clipped"
        for name, weight in plain["weights"].items():
            assert farthest(fused["weights"][name], weight) < (1e-4 if dtype == "float32" else 1e-2)
            for again in ("undone", "resumed"):
                assert torch.equal(fused[again][name], fused["weights"][name]), (again, name)


def test_attention_through_flash_attn_is_that_of_gathered_keys(tmp_path: Path) -> None:
    run("flash_job", tmp_path / "found.pt", library=needed("flash_attn"))
    found = torch.load(tmp_path / "found.pt")
    assert {call.partition("(")[0] for call in found["calls"]} == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}
    assert len(found["gathered"]) == len(found["flash-attn"]) == 20
    for gathered, by_tables in zip(found["gathered"], found["flash-attn"], strict=True):
        assert farthest(gathered, by_tables) < 0.02


def test_kernels_in_triton_compute_what_torch_does_for_random_cases(tmp_path: Path) -> None:
    run("triton_job", "interpreted", tmp_path / "found.pt", library=needed("triton"))
    for found, rounding in zip(torch.load(tmp_path / "found.pt"), (4e-6, 4e-6, 4e-5), strict=True):  # GELU's slope
        assert len(found) == 200 and {dtype for dtype, _ in found} == {"torch.float32", "torch.float16"}
        for dtype, difference in found:
            assert difference < (rounding if dtype == "torch.float32" else 4e-3)


def test_kernels_in_triton_compile_for_gpus_within_their_shared_memory(tmp_path: Path) -> None:
    run("triton_job", "compiled", tmp_path / "found.pt", library=needed("triton"))
    found, (kernel, told) = torch.load(tmp_path / "found.pt")
    assert len(found) == 10 and all(code > 0 and shared < 99 * 2**10 for code, shared in found.values()), found
    assert kernel is None and told[-1].startswith("triton cannot build a kernel") and "caches are dense" in told[-1]
