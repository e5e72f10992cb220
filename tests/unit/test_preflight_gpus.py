"""`oppo validate` on GPUs: machines that are made up, and files as the kernel and nvidia-smi write them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pytest import CaptureFixture, MonkeyPatch

from oppo_megatron.cli import validate
from oppo_megatron.cli.main import main
from oppo_megatron.preflight.gpus import Gpu, Host, NoAnswer, TorchBuild, describe, has_kernels, problems, read_host

ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "compute_90")
H100 = Gpu("NVIDIA H100", 80 * 10**9, (9, 0), peers=7)
NODE = TorchBuild("12.8", ARCHITECTURES, "2.27.3", (H100,) * 8)
HOST = Host("570.86.15", (18,) * 8, ("mlx5_0/1: ACTIVE, 400 Gb/sec (4X NDR)",), 2**34, None, {})
SMI = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
)


def of_all(**changes: object) -> TorchBuild:
    return replace(NODE, gpus=tuple(replace(gpu, **changes) for gpu in NODE.gpus))


def test_a_node_that_lacks_nothing_is_described_and_blamed_for_nothing() -> None:
    assert problems(NODE, HOST) == []
    text = "\n".join(describe(NODE, HOST))
    for word in (
        "cuda:7: NVIDIA H100, 80 GB, compute capability 9.0", "NVIDIA driver: 570.86.15; torch's CUDA 12.8, NCCL 2.27.3",
        "each reaches the others' memory; NVLink: 18 links each", "mlx5_0/1: ACTIVE, 400 Gb/sec", "16.0 GiB",
    ):  # fmt: skip
        assert word in text


@pytest.mark.parametrize(("build", "host", "says"), [
    (of_all(capability=(7, 5)), HOST, "but none for compute capability 7.5"),
    (replace(of_all(capability=(7, 5)), architectures=("sm_75",)), HOST, "set runtime.dtype to float32"),
    (replace(NODE, nccl=None), HOST, "this torch has no NCCL"),
    (of_all(peers=3), HOST, "24 of 56 pairs reach each other's memory"),
    (NODE, replace(HOST, shared_bytes=2**26), "/dev/shm has 64 MiB"),
    (NODE, replace(HOST, shared_bytes=None), "/dev/shm has 0 MiB"),
    (NODE, replace(HOST, ports=("mlx5_0/1: DOWN, 10 Gb/sec (4X SDR)",)), "no InfiniBand or RoCE port is active"),
    (NODE, replace(HOST, memory_lock_bytes=2**26), "at most 65536 KiB may be locked"),
    (NODE, replace(HOST, variables={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}), "until stall_deadline_s"),
    (NODE, replace(HOST, variables={"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE=1 keeps NCCL from NVLink"),
    (NODE, replace(HOST, smi_failed="gave no answer within 20 s"), "nvidia-smi gave no answer within 20 s: the driver"),
    (TorchBuild(None), HOST, "this torch is built for the CPU: install one built for CUDA"),
    (TorchBuild("12.8"), replace(HOST, driver=None), "no NVIDIA driver is loaded"),
    (TorchBuild("12.8"), HOST, "finds no device: the container has none"),
    (TorchBuild("12.8"), replace(HOST, variables={"CUDA_VISIBLE_DEVICES": "GPU-5"}), "VISIBLE_DEVICES=GPU-5 names no device"),
    (NODE, replace(HOST, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "0"}), "CONNECTIONS=0 is not a number from 1 to 32"),
    (NODE, replace(HOST, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "all"}), "as if a device had one hardware queue"),
    (TorchBuild("12.8"), replace(HOST, variables={"CUDA_VISIBLE_DEVICES": ""}), "hides every device"),
])  # fmt: skip
def test_what_is_missing_is_named_with_a_remedy(build: TorchBuild, host: Host, says: str) -> None:
    (problem,) = problems(build, host)
    assert says in problem.text


def test_binaries_serve_their_generation_source_all_later_ones_and_no_gpu_lacks_nothing() -> None:
    assert problems(TorchBuild(None), Host()) == [] == describe(TorchBuild(None), Host())
    one = replace(NODE, gpus=(replace(H100, peers=0),), nccl=None)
    assert problems(one, replace(HOST, shared_bytes=2**26)) == [], "a device alone talks to nobody"
    assert all(has_kernels(capability, ARCHITECTURES) for capability in ((8, 0), (8, 9), (9, 0), (10, 0)))
    assert not has_kernels((7, 5), ARCHITECTURES)
    assert has_kernels((12, 0), ["sm_90", "sm_120a"]) and not has_kernels((12, 0), ["sm_100"])


def test_the_kernels_files_and_nvidia_smi_are_read(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12\n")
    asked: list[list[str]] = []
    host = read_host({"NCCL_IB_DISABLE": "1", "HOME": "/"}, tmp_path, lambda words: asked.append(list(words)) or SMI)
    assert (host.driver, host.links, host.ports) == ("550.54.15", (2, 1), ("mlx5_0/1: ACTIVE, 400 Gb/sec (4X NDR)",))
    assert asked == [["nvlink", "--status"]] and host.variables == {"NCCL_IB_DISABLE": "1"} and host.shared_bytes is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert (read_host({}, tmp_path, lambda words: "").shared_bytes or 0) > 0
    nothing = read_host({}, tmp_path / "none", lambda words: "")
    assert (nothing.driver, nothing.links, nothing.ports) == (None, (), ())

    def no_links(words: Sequence[str]) -> str:
        if "nvlink" in words:
            raise NoAnswer("failed with exit code 3 (not supported)")
        return "GPU 0: NVIDIA A10G\n"

    host = read_host({}, tmp_path / "none", no_links)
    assert host.smi_failed is None and host.links == (), "an nvidia-smi that knows of no links is well"


SMI_FAILS = {
    "a failure": ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "exit code 18 (Failed to init"),
    "without output": ("exit 9", "failed with exit code 9 (without output)"),
    "it hangs": ("exec sleep 60", "gave no answer within 0.3 s"), "no program": (None, "could not be run (Exec format error)"),
}  # fmt: skip


@pytest.mark.parametrize("name", SMI_FAILS)
def test_a_failing_nvidia_smi_is_told(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], name: str) -> None:
    script, says = SMI_FAILS[name]
    program = tmp_path / "nvidia-smi"
    program.write_text("" if script is None else f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("oppo_megatron.preflight.gpus.SMI_S", 0.3 if name == "it hangs" else 20.0)
    monkeypatch.setattr(validate, "torch_build", lambda: NODE)
    assert main(["validate"]) == 0
    report = capsys.readouterr().out.splitlines()
    assert [line for line in report if line.startswith("nvidia-smi: ") and says in line]
    assert [line for line in report if line.startswith("  - nvidia-smi ") and says in line and "dmesg" in line]


def test_the_report_refuses_devices_that_torch_cannot_use(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    device = SimpleNamespace(name="NVIDIA B200", total_memory=180 * 10**9, major=10, minor=0)
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": lambda number: device,
        "can_device_access_peer": lambda one, other: True, "get_arch_list": lambda: ["sm_90"],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(validate, "read_host", lambda environment: HOST)
    assert main(["validate"]) == 1
    out = capsys.readouterr().out
    assert "cuda:1: NVIDIA B200, 180 GB, compute capability 10.0" in out and "NCCL 2.27.3" in out
    assert "kernels for sm_90, but none for compute capability 10.0" in out
    assert "not ready: the GPUs cannot be used" in out
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100"])
    assert main(["validate"]) == 0 and "missing for GPUs" not in capsys.readouterr().out
