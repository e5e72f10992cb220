"""Changes of megatron-core without a CUDA device, kernels of a CPU, process groups of roles, memory that runs out."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from packaging.version import Version

from oppo_megatron.cluster import process_groups
from oppo_megatron.errors import CapacityError, ConfigError
from oppo_megatron.layout.memory import FEW_ROWS, MOST_ROWS, ROW_MULTIPLE
from oppo_megatron.mcore import compat, cpu
from oppo_megatron.mcore.compat import PATCHES, Patch, known_norm, no_lone_sums, norm_on_device
from oppo_megatron.mcore.cpu import IN_PLACE_ROWS, blocks, can_prepack, product, require_private_ops
from oppo_megatron.mcore.device import is_out_of_memory, memory_for, too_many_sequences, too_many_tokens
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from tests.support.processes import room_for
from tests.support.schedules import turns

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


def test_sums_over_one_rank_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group, async_op: summed.append((group, async_op)))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2 if group == "pair" else 1)
    with no_lone_sums():
        for group in (None, "alone", "pair"):
            dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=None, async_op=True)
    assert summed == [("pair", False), (None, True)]


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


@given(st.lists(st.integers(0, 600), min_size=1, max_size=40), st.floats(1, 5000))
def test_rows_keep_their_order_and_are_cut_where_it_pays(lengths: list[int], call: float) -> None:
    def cost(*parts: slice) -> float:
        return sum(len(lengths[part]) * max(lengths[part]) + call for part in parts)

    parts, whole = stretches(lengths, call), slice(0, len(lengths))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert cost(*parts) < cost(whole) or parts == [whole]
    for part in parts:
        for middle in range(part.start + 1, part.stop):
            assert cost(slice(part.start, middle), slice(middle, part.stop)) >= cost(part) - 1e-6


def test_carried_sequences_are_cut_from_new_ones() -> None:
    assert stretches([360, 352, 340, 70, 70, 70, 64, 64], 100) == [slice(0, 3), slice(3, 8)]
    assert stretches([70] * 8, 1) == [slice(0, 8)] and stretches([1, 600], float("inf")) == [slice(0, 2)]
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


LAYOUTS = [(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2, 4, 8), repeat=3) if tp * pp * dp <= 8]
OFFSET = 3  # the role need not begin at rank 0


@dataclass(eq=False)
class FakeGroup:
    ranks: list[int]
    viewer: int
    desc: str

    def rank(self) -> int:
        return self.ranks.index(self.viewer)

    def size(self) -> int:
        return len(self.ranks)


def views(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int) -> tuple[list[int], dict[int, RoleGroups], Any]:
    ranks = list(range(OFFSET, OFFSET + tp * pp * dp))
    calls: dict[int, list[tuple[int, ...]]] = {viewer: [] for viewer in range(OFFSET + len(ranks) + 1)}
    found: dict[int, Any] = {}
    for viewer in calls:

        def new_group(members: tuple[int, ...], desc: str, viewer: int = viewer) -> FakeGroup:
            assert len(members) > 1 or members == (viewer,), "a group of one is made by its rank alone"
            calls[viewer] += [members] if len(members) > 1 else []
            return FakeGroup(list(members), viewer, desc)

        monkeypatch.setattr(process_groups, "new_group", new_group)
        monkeypatch.setattr(dist, "get_rank", lambda viewer=viewer: viewer)
        found[viewer] = build_groups(ranks, tp, pp, "role")
    return ranks, found, calls


@pytest.mark.parametrize("tp,pp,dp", LAYOUTS)
def test_groups_used_in_the_order_of_making_wait_in_no_circle(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int) -> None:
    ranks, found, calls = views(monkeypatch, tp, pp, dp)
    lists = {rank: [(group.desc, tuple(group.ranks)) for group in found[rank].made if group.size() > 1] for rank in ranks}
    assert sum(len({*own}) for own in lists.values()) == sum(map(len, calls[0])), "each group, by each of its members"
    assert turns(lists, lambda group: group[1]) == len({desc for own in lists.values() for desc, _ in own})
    if tp > 1:
        lists[OFFSET] = lists[OFFSET][::-1]
        assert turns(lists, lambda group: group[1]) is None


@pytest.mark.parametrize("tp,pp,dp", LAYOUTS)
def test_groups_are_megatrons_and_each_rank_knows_its_place(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, dp: int) -> None:
    ranks, found, calls = views(monkeypatch, tp, pp, dp)
    assert len(set(map(tuple, calls.values()))) == 1, "every rank creates the same groups of several in the same order"
    assert [viewer for viewer, groups in found.items() if groups is None] == [v for v in found if v not in ranks]
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-dp-pp", rank_offset=OFFSET)
    kinds = {"tp": "tp", "pp": "pp", "dp": "dp", "mp": "tp-pp", "tp_dp_cp": "tp-dp", "dp_cp": "dp", "tp_ep_pp": "tp-pp"}
    for field, token in kinds.items():
        expected = {tuple(members) for members in generator.get_ranks(token)}
        assert {tuple(sorted(getattr(found[rank].collection, field).ranks)) for rank in ranks} == expected, field
    for rank in ranks:
        groups, place = found[rank], rank - OFFSET
        assert (groups.tp, groups.pp, groups.dp) == (tp, pp, dp)
        assert groups.tp_rank == place % tp and groups.pp_rank == place // (tp * dp)
        assert groups.dp_rank == place // tp % dp and groups.is_last_stage == (groups.pp_rank == pp - 1)
        assert groups.all.ranks == ranks == list(groups.ranks)
        assert groups.output_rank == OFFSET + (pp - 1) * tp * dp
        collection = groups.collection
        stages = collection.pp.ranks  # of this rank's pipeline, in their order
        assert stages == [OFFSET + p * tp * dp + place % (tp * dp) for p in range(pp)]
        assert collection.cp.ranks == collection.ep.ranks == [rank]
        ends = {stages[0], stages[-1]}
        assert collection.embd is None if rank not in ends else set(collection.embd.ranks) == ends


def test_sizes_that_do_not_fill_the_ranks_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        build_groups(range(3), 2, 1, "role")


def test_what_allocators_raise() -> None:
    with room_for(64), pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**30)
    with room_for(64), pytest.raises(MemoryError) as by_numpy:
        np.zeros(2**30)
    assert is_out_of_memory(by_torch.value) and is_out_of_memory(by_numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("could not create a primitive")), "oneDNN's kernel had no room for its code"
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not is_out_of_memory(CapacityError("a cache is full")), "ours say something else"
    assert not is_out_of_memory(RuntimeError("[/gloo/transport] connection closed"))


def test_the_error_has_work_cause_and_remedy() -> None:
    with pytest.raises(CapacityError) as raised, room_for(64), memory_for(lambda: ("a test", "use less")):
        torch.empty(2**40)
    assert str(raised.value).startswith("memory ran out in a test (DefaultCPUAllocator: can't allocate memory")
    assert str(raised.value).endswith("); use less")
    for error in ValueError("another"), RuntimeError("another"), CapacityError("another"):
        with pytest.raises(type(error), match="^another$"), memory_for(lambda: ("a test", "use less")):
            raise error


@pytest.mark.parametrize(("lengths", "answers", "size", "remedy"), [
    ([30, 20, 50], 1, 100, "set runtime.micro_batch_tokens to 50 or less"),
    ([70, 20], 1, 90, "set runtime.micro_batch_tokens to 70 or less"), ([90], 1, 90, "lower the maximum lengths"),
    ([30, 40, 20, 20], 2, 110, "set runtime.micro_batch_tokens to 80 or less"), ([30, 40], 2, 70, "lower the maximum lengths"),
])  # fmt: skip
def test_a_micro_batch_keeps_whole_sequences_and_pairs(lengths: list[int], answers: int, size: int, remedy: str) -> None:
    work, named = too_many_tokens("a training micro-batch", lengths, answers)
    assert work == f"a training micro-batch of {size} tokens" and named.startswith(remedy)
    work, remedy = too_many_sequences("a decode step", 32, 9 * 2**20)
    assert work == "a decode step of 32 sequences" and remedy.startswith("set runtime.kv_cache_mb to 4 or less")
