"""Measured memory: that it is of this process and grows with what is held, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import torch

from oppo_megatron.runtime.held_memory import _peak_resident, held_bytes, peak_bytes
from oppo_megatron.train.memory import MemoryByRank, MemoryMeter

CPU = torch.device("cpu")
MIB = 2**20


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
    assert _peak_resident(status) == 2 * MIB
    without = _peak_resident(tmp_path / "absent")  # as where the kernel has no such file
    assert 10 * MIB < without < 2**40


def test_the_rank_furthest_beyond_its_plan_is_named() -> None:
    memory = MemoryByRank(base=[100 * MIB, 200 * MIB], peak=[400 * MIB, 900 * MIB])
    planned = [300 * MIB, 500 * MIB]
    assert memory.summary(planned) == {
        "memory_base_mb": [100, 200],
        "memory_peak_mb": [400, 900],
        "memory_planned_mb": [300, 500],
        "memory_ratio": [1.0, 1.4],
        "memory_halved": 0,
        "memory_train_tokens": None,
        "memory_prefill_tokens": None,
        "memory_decode_sequences": None,
    }
    short = MemoryByRank([0], [0], train=[0, 64, 32], score=[0, 0, 0], decode=[0, 6, 0], halved=4)
    assert short.bounds() == {
        "memory_halved": 4,
        "memory_train_tokens": 32,
        "memory_prefill_tokens": None,
        "memory_decode_sequences": 6,
    }
    assert short.state_dict() == [[0, 0, 0], [64, 0, 6], [32, 0, 0]]
    assert memory.describe(planned) == "memory: at most 1.40 of the plan (rank 1: 700 of 500 MiB, peak above base)"
