"""Changes of megatron-core where there is no CUDA device: each has its reason, its effect, and its limit."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oppo_megatron.mcore.compat import PATCHES, Patch, known_norm, norm_on_device

SPEC = find_spec("megatron.core")
assert SPEC is not None and SPEC.origin is not None
MEGATRON = Path(SPEC.origin).parent

# A process of its own, because the changes are to whole modules.
SCRIPT = """
import importlib, os, sys, types
import torch
from oppo_megatron.mcore import compat

def named():
    found = {"device": torch.cuda.current_device, "sync": torch.cuda.synchronize, "cuda": torch.Tensor.cuda}
    found["type"] = torch.nn.Parameter.type
    for name in ("pipeline_parallel.schedules", "optimizer.optimizer", "optimizer.clip_grads", "utils"):
        found[name] = importlib.import_module(f"megatron.core.{name}").torch
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    found["get_rng"], found["set_rng"] = random._get_cuda_rng_state, random._set_cuda_rng_state
    found["clip"] = importlib.import_module("megatron.core.optimizer.optimizer").clip_grad_by_total_norm_fp32
    return found

before = named()
torch.cuda.is_available = lambda: True
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
assert compat.install() is False and named() == before, "a CUDA device is present: nothing may change"
assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ, "streams side by side need more than one"

torch.cuda.is_available = lambda: False
for patch in compat.PATCHES:
    kept = named()
    patch.apply()
    changed = [name for name, value in named().items() if value is not kept[name]]
    assert len(changed) == 1, (patch.serves, changed)
changed = named()
assert all(changed[name] is not before[name] for name in before), "each patch has an effect, and together all of them"
assert compat.install() is True and all(named()[n] is changed[n] for n in changed), "a second call changes nothing more"

assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
torch.cuda.synchronize()
x = torch.ones(2)
assert x.cuda() is x
for name in ("pipeline_parallel.schedules", "optimizer.optimizer", "optimizer.clip_grads", "utils"):
    proxy = importlib.import_module(f"megatron.core.{name}").torch
    assert proxy.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert proxy.tensor([1.0], device="cuda").tolist() == [1.0] and proxy.float32 is torch.float32
    assert proxy.empty(1, device="meta").device.type == "meta" and proxy.nn is torch.nn
assert torch.nn.Parameter(torch.ones(1).bfloat16()).type() == "torch.cuda.BFloat16Tensor"
assert torch.nn.Parameter(torch.ones(1)).type(torch.float64).dtype == torch.float64

optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
for norm, scale in ((10.0, 0.2), (1.0, 1.0)):
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    a.grad = torch.full((3,), 5.0)
    optimizer.clip_grad_by_total_norm_fp32([a, b], 2.0, norm)
    assert torch.allclose(a.grad, torch.full((3,), 5.0 * scale)) and b.grad is None

from megatron.core.tensor_parallel import checkpoint, random
random.initialize_rng_tracker(inference_rng_tracker=True)
x = torch.randn(4, requires_grad=True)
runs = []
def noisy(x):
    runs.append(torch.rand(4))
    return x * runs[-1]
checkpoint(noisy, False, x).sum().backward()
assert len(runs) == 2 and torch.equal(*runs) and torch.equal(x.grad, runs[0]), "computed again with the same draws"
from megatron.core import parallel_state
compat.make_scratch_memory()
scratch = parallel_state.get_global_memory_buffer()
compat.make_scratch_memory()
assert parallel_state.get_global_memory_buffer() is scratch and scratch.get_tensor([3], torch.float32, "x").shape == (3,)
print("all well")
"""


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.serves)
def test_each_patch_has_its_reason_in_megatron(patch: Patch) -> None:
    path, number = patch.serves.split(":")
    line = (MEGATRON / path).read_text().splitlines()[int(number) - 1]
    assert patch.because in line, f"{patch.serves} now reads {line.strip()!r}: has the patch lost its reason?"


def test_the_optimizer_still_gathers_over_the_world() -> None:
    """The reason of `optimizer_world`."""
    lines = (MEGATRON / "optimizer/__init__.py").read_text().splitlines()
    assert "torch.distributed.get_world_size()" in lines[179] and "all_gather_object" in "".join(lines[179:183])


def test_sequence_parallel_still_needs_the_scratch_memory() -> None:
    """The reason of `make_scratch_memory`."""
    lines = (MEGATRON / "tensor_parallel/layers.py").read_text().splitlines()
    assert "get_global_memory_buffer().get_tensor(" in lines[481]


def test_megatron_still_reads_each_gradients_norm_and_clips_by_one_of_its_own() -> None:
    """The reasons of `keep_norms_on_device` and `known_norm`, and that both give what megatron computes."""
    assert "torch.norm(torch.tensor(l2))" in (MEGATRON / "utils.py").read_text().splitlines()[1205]
    assert "self.get_grad_norm()" in (MEGATRON / "optimizer/optimizer.py").read_text().splitlines()[1313]
    grads = [torch.arange(6.0).view(2, 3), torch.full((4,), 2.0)]
    (norm,) = norm_on_device(0, torch.zeros(1), [grads])[0].tolist()
    assert norm == pytest.approx(float(torch.cat([grad.flatten() for grad in grads]).norm()))
    optimizer = SimpleNamespace(get_grad_norm=lambda: 7.0)
    with known_norm(optimizer, 3.0):
        assert optimizer.get_grad_norm() == 3.0
    assert optimizer.get_grad_norm() == 7.0


def test_stages_still_ask_each_other_for_shapes_and_wait() -> None:
    """The reason of `training.StageMessages`."""
    lines = (MEGATRON / "pipeline_parallel/p2p_communication.py").read_text().splitlines()
    assert "torch.cuda.synchronize()" in lines[241] and ".tolist()" in lines[245] and ".tolist()" in lines[249]


def test_patches_take_effect_without_cuda_and_only_then() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "all well" in done.stdout, done.stderr
