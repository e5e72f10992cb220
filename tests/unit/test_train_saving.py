"""Signals and saved state of a run, and memory that is measured."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from oppo_megatron import cores
from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes, peak_resident_bytes
from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.cluster.world import World
from oppo_megatron.config.load import plain_settings
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import cpu_quotas, group_limits, usable_cores
from oppo_megatron.errors import CapacityError, CheckpointError
from oppo_megatron.layout.memory import shortage
from oppo_megatron.layout.role_memory import lasting_memory
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.train.memory_meter import MemoryByRank, MemoryMeter, require_memory
from oppo_megatron.train.saving.preemption import ECHO_S, HEARD, TORCHRUN, Preemption
from oppo_megatron.train.saving.state import Found, adapter_state, describe_changes, frozen_models, require_same_run, source_state
from tests.support.configs import least_config


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before = {number: signal.getsignal(number) for number in HEARD}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("ranks", "fails"), [(2, True), (2, False), (1, True)])
def test_a_rank_that_fails_among_peers_lives_to_say_why(monkeypatch: pytest.MonkeyPatch, ranks: int, fails: bool) -> None:
    """torch's agent, which has seen its peer end, sends it SIGTERM at that very moment."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), Preemption().listening():
        if fails:
            raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == (fails and ranks == 2)


def test_without_peers_ctrl_c_is_heard_again_after_the_run(monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any]) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    preemption = Preemption()
    with preemption.listening():
        preemption.ask()
    assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def signalled_twice(number: signal.Signals) -> Preemption:
    preemption, threads = Preemption(), threading.enumerate()
    with preemption.listening():
        (ear,) = set(threading.enumerate()).difference(threads)
        for _ in range(2):
            signal.raise_signal(number)
    ear.join(60)  # it hears all that came before the block's end
    preemption.saved()
    assert not ear.is_alive()
    return preemption


@pytest.mark.parametrize(("by_torchrun", "apart_s", "ended"), [(False, 0.0, True), (True, 0.0, False), (True, ECHO_S, True)])
def test_the_second_ctrl_c_ends_a_rank_but_not_the_echo_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], by_torchrun: bool, apart_s: float, ended: bool
) -> None:
    """A terminal sends it to torchrun and its ranks, and torchrun passes it on to the ranks."""
    times, codes = iter([100.0, 100.0 + apart_s]), []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr("oppo_megatron.train.saving.preemption.time.monotonic", lambda: next(times, 200.0))
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delenv(TORCHRUN, raising=False)
    if by_torchrun:
        monkeypatch.setenv(TORCHRUN, "7")
    assert signalled_twice(signal.SIGINT).asked and codes == ([130] if ended else [])
    assert capfd.readouterr().err.count("interrupted: the run saves what it has trained") == 1


def test_hang_ups_ask_once_and_are_left_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed terminal's come twice, from the shell and from the kernel; `nohup` ignores them."""
    codes: list[int] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(os, "_exit", codes.append)
    assert signalled_twice(signal.SIGHUP).asked and not codes
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption().listening():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_a_deadline_signals_are_left_alone(monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any]) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with Preemption(0.0).listening():
        assert {number: signal.getsignal(number) for number in HEARD} == handlers
    assert {number: signal.getsignal(number) for number in HEARD} == handlers
    with Preemption(1.0).listening():
        assert all(signal.getsignal(number) != handler for number, handler in handlers.items())


def test_a_null_reference_is_another_with_other_adapters(tmp_path: Path) -> None:
    def models(adapter: str | None, **sections: Any) -> Any:
        actor = {"checkpoint": "a", "lora": {"rank": 4, "adapter": adapter}}
        return frozen_models(plain_settings(least_config(tmp_path, actor=actor, **sections)))

    assert models("one") == models("one") != models("another") != models(None)
    named = {"reference": {"checkpoint": "r"}}
    assert models("one", **named) == models("another", **named), "a reference that is named has no adapters"


def test_rollouts_of_prompts_that_are_left_out_are_not_taken_up() -> None:
    lines = [{"seq_id": seq_id} for seq_id in (3, 5, 8)]
    found = Found(Path("step-000002"), {"done": 2, "scheduler": {"position": 9}}, lines)
    assert found.held(frozenset()) == lines and found.held({5}) == [lines[0], lines[2]]
    assert found.ahead({5, 20}) == Ahead(2, 9, 2, frozenset({5, 20}))


@pytest.mark.parametrize("named_by", ["file", "module"])
def test_changes_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str) -> None:
    file = tmp_path / "changing_reward.py"
    file.write_text("def score(prompt, response, fields):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_point = f"{file if named_by == 'file' else 'changing_reward'}:score"
    config = least_config(tmp_path / "run", rewards=[{"kind": "python", "entry_point": entry_point}])
    state = {"saved_at": time.time() - 185, "done": 2, "config": {"seed": 1}, "sources": source_state(config)}
    found = Found(tmp_path / "step-000002", state, [])
    start = f"{tmp_path}: continued from checkpoint step-000002, saved 3m05s ago, after 2 steps"
    assert describe_changes(tmp_path, found, {"seed": 1}, source_state(config)) == [start]
    file.write_text("def score(prompt, response, fields):\n    return 2.0\n")
    told = describe_changes(tmp_path, found, {"seed": 2}, source_state(config))
    assert told == [start, "changed: seed: 1 -> 2", f"changed: the file of {entry_point}"]


@pytest.mark.parametrize(("entries", "adapters", "says"), [
    ({"seed": 5}, {}, "seed is 5, but the checkpoint's run has 11"), ({"shuffle": False}, {}, "data.shuffle is False, but"),
    ({"rows": 7}, {}, "the number of usable prompts is 7, but"),
    ({"group_size": 2}, {}, "rollout.group_size is 2, but the checkpoint's run has 1"),
    ({"greedy": True}, {}, r"whether a prompt has a greedy response \(algorithm.baseline\) is True, but"),
    ({"fingerprint": "b" * 64}, {}, "resume with the same data, tokenizer and template"),
    ({}, {"alpha": 8.0}, r"actor.lora is rank 4, alpha 8.0, .* but the checkpoint's run has rank 4, alpha 16.0"),
    ({}, {"targets": ["q_proj"]}, r"actor.lora is .*targets \['q_proj'\], but the checkpoint's run has rank 4"),
    ({}, None, "actor.lora is null, but the checkpoint's run has rank 4"),
])  # fmt: skip
def test_other_adapters_are_refused(tmp_path: Path, entries: dict[str, Any], adapters: dict[str, Any] | None, says: str) -> None:
    lora = {"rank": 4, "alpha": 16.0}
    then = least_config(tmp_path, actor={"checkpoint": "a", "lora": lora})
    data = {"seed": 11, "shuffle": True, "rows": 8, "fingerprint": "a" * 64, "group_size": 1, "greedy": False}
    found = Found(tmp_path, {"data": data, "adapters": adapter_state(then)}, [])
    require_same_run(found, data, then)
    now = least_config(tmp_path, actor={"checkpoint": "a", "lora": None if adapters is None else lora | adapters})
    with pytest.raises(CheckpointError, match=says):
        require_same_run(found, data | entries, now)


CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30


def test_what_is_held_for_a_while_stays_in_the_peak_which_the_kernel_has_in_kibibytes(tmp_path: Path) -> None:
    before = held_bytes(CPU)
    meter = MemoryMeter.begin(CPU)
    held = torch.ones(256 * MIB // 4)
    assert held_bytes(CPU) - before > 250 * MIB
    del held
    meter.look()
    assert meter.peak_bytes - meter.base_bytes > 250 * MIB
    assert held_bytes(CPU) - before < 100 * MIB and peak_bytes(CPU) >= meter.peak_bytes
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert peak_resident_bytes(status) == 2 * MIB
    without = peak_resident_bytes(tmp_path / "absent")  # as where the kernel has no such file
    assert 10 * MIB < without < 2**40


def test_the_rank_furthest_beyond_its_plan_is_named() -> None:
    memory = MemoryByRank(base=[100 * MIB, 200 * MIB], peak=[400 * MIB, 900 * MIB])
    planned = [300 * MIB, 500 * MIB]
    assert memory.summary(planned) == {
        "memory_base_mb": [100, 200], "memory_peak_mb": [400, 900], "memory_planned_mb": [300, 500], "memory_ratio": [1.0, 1.4],
    }  # fmt: skip
    assert memory.describe(planned) == "memory: at most 1.40 of the plan (rank 1: 700 of 500 MiB, peak above base)"
    small = MemoryByRank([100 * MIB] * 2, [160 * MIB, 290 * MIB])
    assert "60 MiB above base on rank 0, 44 more than the plan's 16: no more than what" in small.describe([16 * MIB, 120 * MIB])
    assert "at most 2.38 of the plan (rank 1: 190 of 80 MiB" in small.describe([16 * MIB, 80 * MIB]), (
        "not rank 0, of a higher ratio"
    )
    assert "at most 0.75 of the plan (rank 0: 60 of 80 MiB" in small.describe([80 * MIB, 500 * MIB])


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
    with pytest.raises(CapacityError, match=r"of rank 0-1 take [\d.]+ GiB on host, which has .*: the run's `--dry-run` shows"):
        require_memory(config, world("0", "0"))
    require_memory(config, world("0", "1"))
    with pytest.raises(CapacityError, match="of rank 0 take"):
        require_memory(pair(tmp_path, ceil(2 * device_bytes(CPU) / (two - one))), world("0", "1"))
    assert shortage([4 * GIB, 5 * GIB], 9 * GIB, "rank 0-1", "a") is None
    told = str(shortage([4 * GIB, 5 * GIB], 8 * GIB, "rank 0-1", "a"))
    assert "KV caches of rank 0-1 take 9.0 GiB on a, which has 8.0 GiB" in told


def control_groups(folder: Path, limits: dict[str, object]) -> tuple[Path, Path]:
    for path, limit in limits.items():
        (folder / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / path).write_text(f"{limit}\n")
    return folder / "cgroup", folder / "groups"


def test_a_job_has_what_its_control_groups_leave_it(tmp_path: Path) -> None:
    """Both versions; a group may be bound by one around it, and may not show in a container."""
    membership, groups = control_groups(tmp_path, {
        "memory.max": "max", "job/memory.max": 4 * GIB, "job/step/memory.max": "max",
        "memory/memory.limit_in_bytes": 2**63 - 4096, "memory/slurm/memory.limit_in_bytes": 3 * GIB,
    })  # fmt: skip
    for text, found in {
        "0::/job/step\n": [4 * GIB], "0::/\n": [], "0::/not/shown\n": [],
        "9:name=systemd:/job\n4:cpu,memory:/slurm/step\n0::/\n": [3 * GIB, 2**63 - 4096],
    }.items():  # fmt: skip
        membership.write_text(text)
        assert list(group_limits(membership, groups)) == found, text


def test_a_job_has_the_cores_that_its_control_groups_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's quota of time, in either version; less than a core is one."""
    membership, groups = control_groups(tmp_path, {
        "cpu.max": "max 100000", "job/cpu.max": "250000 100000", "job/step/cpu.max": "max 100000", "half/cpu.max": "50000 100000",
        "cpu/docker/cpu.cfs_quota_us": 300000, "cpu/docker/cpu.cfs_period_us": 100000,
        "cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000,
    })  # fmt: skip
    monkeypatch.setattr(cores, "MEMBERSHIP", membership)
    monkeypatch.setattr(cores, "GROUPS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, quotas, usable in [
        ("0::/job/step\n", [2.5], 2), ("0::/half\n", [0.5], 1), ("0::/\n", [], 8), ("3:cpuset:/docker\n", [], 8),
        ("3:cpu,cpuacct:/docker\n1:memory:/docker\n0::/\n", [3.0], 3),
    ]:  # fmt: skip
        membership.write_text(text)
        assert list(cpu_quotas(membership, groups)) == quotas, text
        assert usable_cores() == usable, text
    assert list(group_limits(tmp_path / "absent", groups)) == []
    assert 0 < device_bytes(CPU) <= psutil.virtual_memory().total
