"""Changes of megatron-core where there is no CUDA device: each has its reason, its effect, and its limit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from oppo_megatron.mcore import compat
from oppo_megatron.mcore.compat import PATCHES, Patch, known_norm, norm_on_device

MEGATRON = Path(compat.megatron.core.__file__).parent

# A process of its own, because the changes are to whole modules.
SCRIPT = """
import importlib, os, sys, types
import torch
from oppo_megatron.mcore import compat

def named():
    found = {"device": torch.cuda.current_device, "sync": torch.cuda.synchronize, "cuda": torch.Tensor.cuda}
    found["type"], found["stream"] = torch.nn.Parameter.type, torch.cuda.current_stream
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


def functions(path: str, name: str) -> list[str]:
    """Sources of megatron-core's functions of that name."""
    source = (MEGATRON / path).read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    return [ast.get_source_segment(source, node) or "" for node in found]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.serves}-{patch.because}")
def test_each_patch_has_its_reason_in_megatron(patch: Patch) -> None:
    sources = functions(*patch.serves.split(":"))
    has_reason = any(patch.because in source for source in sources)
    assert sources and has_reason == patch.is_needed, f"{patch.serves}: the reason of this patch is there: {has_reason}"


@pytest.mark.parametrize("path,name,texts", [
    ("optimizer/__init__.py", "_get_param_groups", (".get_world_size()", "all_gather_object")),  # optimizer_world
    ("tensor_parallel/layers.py", "forward", ("get_global_memory_buffer().get_tensor(",)),  # make_scratch_memory
    ("utils.py", "local_multi_tensor_l2_norm", ("torch.norm(torch.tensor(l2))",)),  # keep_norms_on_device
    ("optimizer/optimizer.py", "step", ("self.get_grad_norm()",)),  # known_norm
    ("pipeline_parallel/p2p_communication.py", "_communicate_shapes", ("cuda.synchronize()", ".tolist()")),  # StageMessages
])  # fmt: skip
def test_each_other_change_has_its_reason_in_megatron(path: str, name: str, texts: tuple[str, ...]) -> None:
    assert any(all(text in source for text in texts) for source in functions(path, name)), functions(path, name)


def test_later_versions_build_layers_otherwise() -> None:
    """The reasons of `parts_of` and `mark_shards`, and of the second half of `known_norm`."""
    (built,) = functions("models/gpt/gpt_layer_specs.py", "get_mlp_module_spec_for_backend")
    marking = [source for source in functions("tensor_parallel/layers.py", "__init__") if "set_tensor_model_parallel" in source]
    version = Version(compat.megatron.core.__version__)
    assert {"return partial(" in built, len(marking) == 3} == {version >= Version("0.18")}
    waits = any("flag.item()" in source for source in functions("optimizer/optimizer.py", "has_grad_norm_group"))
    assert waits == (version >= Version("0.19"))


def test_the_norms_are_what_megatron_computes() -> None:
    grads = [torch.arange(6.0).view(2, 3), torch.full((4,), 2.0)]
    (norm,) = norm_on_device(0, torch.zeros(1), [grads])[0].tolist()
    assert norm == pytest.approx(float(torch.cat([grad.flatten() for grad in grads]).norm()))
    optimizer = SimpleNamespace(get_grad_norm=lambda: 7.0)
    with known_norm(optimizer, 3.0):
        assert optimizer.get_grad_norm() == 3.0 and not optimizer.has_grad_norm_group("mtp")
    assert optimizer.get_grad_norm() == 7.0


def test_patches_take_effect_without_cuda_and_only_then() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "all well" in done.stdout, done.stderr
