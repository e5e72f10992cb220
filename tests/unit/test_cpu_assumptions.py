"""CPU-only ways are not taken on a CUDA device: fake tensors, of which nothing is computed, show which way is taken.
Device "meta" stands for CUDA where torch's build for the CPU cannot index its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.layout.memory import WHOLE_MULTIPLE
from oppo_megatron.mcore import roles
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.cpu import HalfOnCpu, can_prepack
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.kv.dense import KVCache
from oppo_megatron.mcore.layers import fixed_norm, rms_norm
from oppo_megatron.mcore.vocab import VocabShards, token_logprobs
from tests.support.ppo import SHAPE

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


@contextmanager
def tensors_of(device: torch.device) -> Iterator[Callable[..., Tensor]]:
    with FakeTensorMode() if device.type == "cuda" else nullcontext(), torch.no_grad():
        yield lambda *shape, dtype=torch.bfloat16: torch.ones(shape, dtype=dtype, device=device)


@contextmanager
def counted(owner: Any, name: str) -> Iterator[Counter[str]]:
    function, calls = getattr(owner, name), Counter[str]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield calls


@pytest.fixture(scope="module")
def groups() -> Iterator[RoleGroups]:
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}):
        found = build_groups([0], 1, 1, "actor")
        assert found is not None
        yield found


def test_weights_are_laid_out_for_a_cpus_products_only() -> None:
    with tensors_of(CUDA) as made:
        assert not any(can_prepack(made(8, 8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert can_prepack(torch.ones(8, 8)) is torch.backends.mkldnn.is_available()


@pytest.mark.parametrize(("device", "calls"), [(CPU, 0), (CUDA, 2)])
def test_the_norm_is_torchs_kernel_but_on_a_cpu(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(F, "rms_norm") as found:
        for out in (rms_norm(made(3, 8), made(8), 1e-5), fixed_norm(made(8), 1e-5)(made(3, 8))):
            assert out.shape == (3, 8) and out.device.type == device.type and out.dtype == torch.bfloat16
    assert found["rms_norm"] == calls


def opened(made: Any, device: torch.device, num_seqs: int) -> KVCache:
    cache = KVCache(
        num_layers=1, num_kv_heads=2, head_dim=8, num_slots=num_seqs, max_length=700, dtype=torch.bfloat16, device=device,
        rope=(made(700, 8, dtype=torch.float32), made(700, 8, dtype=torch.float32)),
    )  # fmt: skip
    for seq_id in range(num_seqs):
        cache.open(seq_id)
    return cache


@pytest.mark.parametrize(("device", "calls"), [(CPU, 3), (META, 1)])
def test_sequences_of_a_prefill_attend_one_by_one_on_a_cpu_and_at_once_elsewhere(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(F, "scaled_dot_product_attention") as found:
        cache = opened(made, device, 3)
        plan = cache.begin(range(3), [600, 300, 100])
        out = plan.attend(0, made(1000, 4, 8), made(1000, 2, 8), made(1000, 2, 8), 0.1, None)
        assert out.shape == (1000, 32) and out.device.type == device.type
    assert found["scaled_dot_product_attention"] == calls


@pytest.mark.parametrize(("device", "calls"), [(CPU, 2), (META, 1)])
def test_on_a_cpu_alone_long_sequences_attend_apart_from_short_ones(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made:
        cache = opened(made, device, 8)
        plan = cache.begin(range(8), [650, *[10] * 7])
        plan.attend(0, made(720, 4, 8), made(720, 2, 8), made(720, 2, 8), 0.1, None)
        cache.commit(plan)
        with counted(F, "scaled_dot_product_attention") as found:
            plan = cache.begin(range(8), [2] * 8)
            assert plan.attend(0, made(16, 4, 8), made(16, 2, 8), made(16, 2, 8), 0.1, None).shape == (16, 32)
    assert found["scaled_dot_product_attention"] == calls


@pytest.mark.parametrize(("device", "calls"), [(CPU, 2), (META, 0)])
def test_bfloat16_attention_of_whole_sequences_is_torchs_own_but_on_a_cpu(device: torch.device, calls: int) -> None:
    with tensors_of(device) as made, counted(HalfOnCpu, "apply") as found:
        plan = PackedPlan([3, 4], (made(9, 8, dtype=torch.float32), made(9, 8, dtype=torch.float32)))
        assert plan.attend(0, made(7, 4, 8), made(7, 2, 8), made(7, 2, 8), 0.1).shape == (7, 32)
    assert found["apply"] == calls


def test_log_probs_take_few_kernels_on_a_gpu(groups: RoleGroups) -> None:
    shards, blocks = VocabShards(groups.collection.tp, 50_000, 50_000), {}
    for device in (CPU, META):
        with tensors_of(device) as made, counted(Tensor, "exp") as found:
            token_logprobs(made(64, 50_000), made(64, dtype=torch.int64), shards)
        blocks[device.type] = found["exp"]
    assert blocks["meta"] == 1 < blocks["cpu"]


def test_rows_are_filled_up_for_a_cpus_bfloat16_alone(groups: RoleGroups) -> None:
    config = ModelConfig(init=SHAPE, dtype="bfloat16")
    model = roles.load_role(config, groups, head="lm", max_length=64, device=CPU)
    assert model.token_multiple == WHOLE_MULTIPLE
    assert model.to("meta").token_multiple == 1


def test_memory_is_the_devices_where_a_rank_computes_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(total_memory=9))
    assert (held_bytes(CUDA), peak_bytes(CUDA), device_bytes(CUDA)) == (5, 7, 9)
    assert min(held_bytes(CPU), peak_bytes(CPU), device_bytes(CPU)) > 2**20
