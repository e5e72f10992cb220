"""Measured memory: that it is of this process and grows with what is held, and what is said of it."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

import psutil
import pytest
import torch

from oppo_megatron import cores
from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes, peak_resident_bytes
from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import cpu_quotas, group_limits, usable_cores
from oppo_megatron.errors import CapacityError
from oppo_megatron.layout.memory import shortage
from oppo_megatron.layout.role_memory import lasting_memory
from oppo_megatron.train.memory_meter import MemoryByRank, MemoryMeter, require_memory
from tests.support.configs import least_config

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def test_what_is_held_for_a_while_stays_in_the_peak() -> None:
    before = held_bytes(CPU)
    meter = MemoryMeter.begin(CPU)
    held = torch.ones(256 * MIB // 4)
    assert held_bytes(CPU) - before > 250 * MIB
    del held
    meter.look()
    assert meter.peak_bytes - meter.base_bytes > 250 * MIB
    assert held_bytes(CPU) - before < 100 * MIB and peak_bytes(CPU) >= meter.peak_bytes


def test_the_kernels_high_water_mark_is_in_kibibytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert peak_resident_bytes(status) == 2 * MIB
    without = peak_resident_bytes(tmp_path / "absent")  # as where the kernel has no such file
    assert 10 * MIB < without < 2**40


def test_the_rank_furthest_beyond_its_plan_is_named() -> None:
    memory = MemoryByRank(base=[100 * MIB, 200 * MIB], peak=[400 * MIB, 900 * MIB])
    planned = [300 * MIB, 500 * MIB]
    assert memory.summary(planned) == {
        "memory_base_mb": [100, 200],
        "memory_peak_mb": [400, 900],
        "memory_planned_mb": [300, 500],
        "memory_ratio": [1.0, 1.4],
    }
    assert memory.describe(planned) == "memory: at most 1.40 of the plan (rank 1: 700 of 500 MiB, peak above base)"
    tiny = MemoryByRank([100 * 2**20], [160 * 2**20])
    assert "60 MiB above base on rank 0, but the plan has 16: in runs this small" in tiny.describe([16 * 2**20])
    assert "at most 0.75 of the plan (rank 0: 60 of 80 MiB" in tiny.describe([80 * 2**20])


def pair(run_dir: Path, layers: int) -> TrainConfig:
    """Actor and critic of most of a GiB a layer, on a rank each."""
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = {"init": {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": 64, **sizes}}
    return least_config(run_dir, actor=model, critic=model, runtime={"device": "cpu"})


def world(*nodes: str) -> World:
    return World(0, len(nodes), CPU, tuple(RankHost(r, "host", node, "cpu", 1, 1) for r, node in enumerate(nodes)))


def test_ranks_that_cannot_fit_their_host_end_before_they_begin(tmp_path: Path) -> None:
    one, two = (max(lasting_memory(pair(tmp_path, layers), on_cpu=True)) for layers in (1, 2))
    config = pair(tmp_path, ceil(0.8 * device_bytes(CPU) / (two - one)))
    with pytest.raises(CapacityError, match=r"of rank 0-1 take [\d.]+ GiB on host, which has .*: `--dry-run` shows"):
        require_memory(config, world("0", "0"))
    require_memory(config, world("0", "1"))
    with pytest.raises(CapacityError, match="of rank 0 take"):
        require_memory(pair(tmp_path, ceil(2 * device_bytes(CPU) / (two - one))), world("0", "1"))


def test_what_lasts_is_held_against_what_there_is() -> None:
    assert shortage([4 * GIB, 5 * GIB], 9 * GIB, "rank 0-1", "a") is None
    told = str(shortage([4 * GIB, 5 * GIB], 8 * GIB, "rank 0-1", "a"))
    assert "KV caches of rank 0-1 take 9.0 GiB on a, which has 8.0 GiB" in told


def test_a_job_has_what_its_control_groups_leave_it(tmp_path: Path) -> None:
    """Both versions; a group may be bound by one around it, and may not show in a container."""
    membership, groups = tmp_path / "cgroup", tmp_path / "groups"
    for path, limit in {
        "memory.max": "max", "job/memory.max": str(4 * GIB), "job/step/memory.max": "max",
        "memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/slurm/memory.limit_in_bytes": str(3 * GIB),
    }.items():  # fmt: skip
        (groups / path).parent.mkdir(parents=True, exist_ok=True)
        (groups / path).write_text(limit + "\n")
    for text, found in {
        "0::/job/step\n": [4 * GIB],
        "0::/\n": [],
        "0::/not/shown\n": [],
        "9:name=systemd:/job\n4:cpu,memory:/slurm/step\n0::/\n": [3 * GIB, 2**63 - 4096],
    }.items():
        membership.write_text(text)
        assert list(group_limits(membership, groups)) == found, text


def test_a_job_has_the_cores_that_its_control_groups_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's quota of time, in either version; less than a core is one."""
    membership, groups = tmp_path / "cgroup", tmp_path / "groups"
    for path, limit in {
        "cpu.max": "max 100000", "job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000", "half/cpu.max": "50000 100000",
        "cpu/docker/cpu.cfs_quota_us": "300000", "cpu/docker/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    }.items():  # fmt: skip
        (groups / path).parent.mkdir(parents=True, exist_ok=True)
        (groups / path).write_text(limit + "\n")
    monkeypatch.setattr(cores, "MEMBERSHIP", membership)
    monkeypatch.setattr(cores, "GROUPS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, quotas, usable in [
        ("0::/job/step\n", [2.5], 2),
        ("0::/half\n", [0.5], 1),
        ("0::/\n", [], 8),
        ("3:cpu,cpuacct:/docker\n1:memory:/docker\n0::/\n", [3.0], 3),
        ("3:cpuset:/docker\n", [], 8),
    ]:
        membership.write_text(text)
        assert list(cpu_quotas(membership, groups)) == quotas, text
        assert usable_cores() == usable, text
    assert list(group_limits(tmp_path / "absent", groups)) == []
    assert 0 < device_bytes(CPU) <= psutil.virtual_memory().total
