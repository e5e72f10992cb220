"""A machine's GPUs, for `oppo validate`: `TorchBuild`, and the kernel's files and nvidia-smi."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage, which

from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS

LEAST_CAPABILITY = (8, 0)
"""Needed for bfloat16 products and FlashAttention-2."""
SHARED, LEAST_SHARED_BYTES = "dev/shm", 2**30
SMI_S = 20.0
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", CONNECTIONS, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """`peers`: number of other devices whose memory it can address."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    peers: int = 0


@dataclass(frozen=True)
class TorchBuild:
    """`cuda` None: CPU."""

    cuda: str | None
    architectures: tuple[str, ...] = ()
    nccl: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Host:
    """`links`: NVLinks per GPU; `ports`: InfiniBand or RoCE ports by state and rate.

    `memory_lock_bytes`: None if unlimited, as these ports need. `smi_failed`: why an installed nvidia-smi fails.
    """

    driver: str | None = None
    links: tuple[int, ...] = ()
    ports: tuple[str, ...] = ()
    shared_bytes: int | None = None
    memory_lock_bytes: int | None = None
    variables: Mapping[str, str] | None = None
    smi_failed: str | None = None


class NoAnswer(Exception):
    """nvidia-smi exists, but fails or is late."""


@dataclass(frozen=True)
class Problem:
    """Something missing, with a remedy; `stops`: no run on these devices is possible."""

    text: str
    stops: bool = False


def read_host(environment: Mapping[str, str], root: Path = Path("/"), ask: Callable[[Sequence[str]], str] | None = None) -> Host:
    """Read files below `root`; `ask` runs nvidia-smi: "" if absent, or raises NoAnswer."""
    ask = ask or _nvidia_smi
    links, smi_failed = tuple[int, ...](), None
    try:
        links = _links(ask(["nvlink", "--status"]))
    except NoAnswer:  # unknown links are not a failure
        try:
            ask(["--list-gpus"])
        except NoAnswer as error:
            smi_failed = str(error)
    version = root / "proc/driver/nvidia/version"  # `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...`
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version.read_text(encoding="utf-8")) if version.is_file() else None
    ports = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, rate = ((port / name).read_text(encoding="utf-8").strip() for name in ("state", "rate"))
        ports.append(f"{port.parts[-3]}/{port.name}: {state.rpartition(': ')[2]}, {rate}")
    shared, lock = root / SHARED, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Host(
        driver=driver[1] if driver else None,
        links=links,
        ports=tuple(ports),
        shared_bytes=disk_usage(shared).total if shared.is_dir() else None,
        memory_lock_bytes=None if lock == resource.RLIM_INFINITY else lock,
        variables={name: environment[name] for name in VARIABLES if name in environment},
        smi_failed=smi_failed,
    )


def _links(output: str) -> tuple[int, ...]:
    """Active links per GPU: `Link 0: 26.562 GB/s` under `GPU 0: ...`."""
    parts = re.split(r"^GPU \d+:", output, flags=re.MULTILINE)[1:]
    return tuple(len(re.findall(r"Link \d+: [\d.]+ GB/s", part)) for part in parts)


def _nvidia_smi(arguments: Sequence[str]) -> str:
    program = which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603
            [program, *arguments], capture_output=True, text=True, errors="replace", check=False, timeout=SMI_S
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"gave no answer within {SMI_S:g} s") from None
    except OSError as error:
        raise NoAnswer(f"could not be run ({error.strerror})") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise NoAnswer(f"failed with exit code {done.returncode} ({said[:200] or 'without output'})")
    return done.stdout


def describe(torch: TorchBuild, host: Host) -> list[str]:
    if not torch.gpus:
        return [] if host.driver is None else [f"NVIDIA driver: {host.driver}"]
    lines = [
        f"cuda:{number}: {gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB, compute capability {_dotted(gpu.capability)}"
        for number, gpu in enumerate(torch.gpus)
    ]
    shared = "none" if host.shared_bytes is None else f"{host.shared_bytes / 2**30:.1f} GiB"
    lines.append(f"NVIDIA driver: {host.driver or 'version unknown'}; torch's CUDA {torch.cuda}, NCCL {torch.nccl or 'absent'}")
    if host.smi_failed is not None:
        lines.append(f"nvidia-smi: {host.smi_failed}")
    if len(torch.gpus) > 1:
        least, most = min(host.links, default=0), max(host.links, default=0)
        links = f"{most} links each" if least == most and most else "none" if not most else f"{least} to {most} links each"
        known = links if host.links else "unknown (nvidia-smi does not say)"
        lines.append(f"between devices: {_reach(torch.gpus)}; NVLink: {known}")
    lines.append(f"InfiniBand or RoCE: {'; '.join(host.ports) or 'no port: between hosts NCCL uses sockets'}")
    lines.append(f"shared memory (/{SHARED}): {shared}")
    lines += [f"{name}={value}" for name, value in (host.variables or {}).items()]
    return lines


def problems(torch: TorchBuild, host: Host) -> list[Problem]:
    if not torch.gpus:
        return list(_no_device(torch, host))
    return [*_devices(torch), *_smi(host), *_between(torch, host), *_settings(host)]


def _no_device(torch: TorchBuild, host: Host) -> Iterator[Problem]:
    hidden = (host.variables or {}).get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if torch.cuda is None:
        if host.driver is not None:
            yield Problem(
                f"an NVIDIA driver ({host.driver}) is loaded, but this torch is built for the CPU: install one built for "
                "CUDA, or start in a container that has one"
            )
    elif hidden:
        yield Problem("CUDA_VISIBLE_DEVICES hides every device: unset it to compute on GPUs")
    elif host.driver is None:
        yield Problem(
            f"torch is built for CUDA {torch.cuda}, but no NVIDIA driver is loaded: install it, or give the container its "
            "devices (docker run --gpus all; Slurm: --gpus-per-node)"
        )
    else:
        yield from _smi(host)
        named = (host.variables or {}).get("CUDA_VISIBLE_DEVICES")
        shown = "" if named is None else f"CUDA_VISIBLE_DEVICES={named} names no device here (nvidia-smi -L lists them), "
        yield Problem(
            f"the NVIDIA driver ({host.driver}) is loaded, but torch, built for CUDA {torch.cuda}, finds no device: {shown}the "
            "container has none (docker run --gpus all), or the driver is older than this CUDA needs (update it, or install "
            "a torch built for an older CUDA)"
        )


def _smi(host: Host) -> Iterator[Problem]:
    if host.smi_failed is not None:
        yield Problem(
            f"nvidia-smi {host.smi_failed}: the driver may have been updated without a restart, or hang on a device; read the "
            "output of nvidia-smi and `dmesg | grep -i -e NVRM -e Xid`, and restart the machine if necessary"
        )


def _devices(torch: TorchBuild) -> Iterator[Problem]:
    for capability in sorted({gpu.capability for gpu in torch.gpus}):
        where = ", ".join(f"cuda:{number}" for number, gpu in enumerate(torch.gpus) if gpu.capability == capability)
        if not has_kernels(capability, torch.architectures):
            yield Problem(
                f"{where}: this torch has kernels for {' '.join(torch.architectures)}, but none for compute capability "
                f"{_dotted(capability)}: install a torch built for it",
                stops=True,
            )
        elif capability < LEAST_CAPABILITY:
            yield Problem(
                f"{where}: compute capability {_dotted(capability)} has neither fast bfloat16 nor FlashAttention-2, which need "
                f"{_dotted(LEAST_CAPABILITY)}: set runtime.dtype to float32, or use newer devices"
            )
    if torch.nccl is None and len(torch.gpus) > 1:
        yield Problem("this torch has no NCCL for messages between GPUs: install one that has it", stops=True)


def _between(torch: TorchBuild, host: Host) -> Iterator[Problem]:
    if len(torch.gpus) > 1:
        if not all(gpu.peers == len(torch.gpus) - 1 for gpu in torch.gpus):
            yield Problem(
                f"between devices: {_reach(torch.gpus)}; messages of the others go through the host's memory: keep tp within "
                "devices that reach each other, and turn off the IOMMU and PCIe ACS"
            )
        if (host.shared_bytes or 0) < LEAST_SHARED_BYTES:
            yield Problem(
                f"/{SHARED} has {(host.shared_bytes or 0) / 2**20:.0f} MiB for messages of NCCL within the host: start the "
                "container with --shm-size=16g or --ipc=host"
            )
    if host.ports:
        if not any("ACTIVE" in port for port in host.ports):
            yield Problem(
                f"no InfiniBand or RoCE port is active ({'; '.join(host.ports)}): between hosts NCCL uses sockets, which "
                "are slow; see ibstat and the cables"
            )
        if host.memory_lock_bytes is not None:
            yield Problem(
                f"at most {host.memory_lock_bytes / 2**10:.0f} KiB may be locked in memory, and InfiniBand locks its buffers: "
                "ulimit -l unlimited (docker run --ulimit memlock=-1)"
            )


def _settings(host: Host) -> Iterator[Problem]:
    variables = host.variables or {}
    if variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield Problem(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 lets a rank wait for a dead peer until stall_deadline_s, not "
            "runtime.timeout_s: unset it"
        )
    queues = variables.get(CONNECTIONS, "").strip()
    if queues and not (queues.isdecimal() and int(queues)):
        yield Problem(
            f"{CONNECTIONS}={queues} is not a number from 1 to {MOST_CONNECTIONS}: rounds are planned as if a device had one "
            f"hardware queue; unset it, and runs use {MOST_CONNECTIONS}"
        )
    for name, lost in (("NCCL_P2P_DISABLE", "NVLink and PCIe between devices"), ("NCCL_IB_DISABLE", "InfiniBand")):
        if variables.get(name, "0") not in ("", "0"):
            yield Problem(f"{name}={variables[name]} keeps NCCL from {lost}: unset it, unless that is intended")


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if torch's kernels run: sm_ of the generation and not newer, or older compute_."""
    for kind, major, minor in (
        (found[1], int(found[2]), int(found[3]))
        for found in map(re.compile(r"(sm|compute)_(\d+)(\d)a?f?$").match, architectures)
        if found
    ):
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def _reach(gpus: Sequence[Gpu]) -> str:
    pairs, reached = len(gpus) * (len(gpus) - 1), sum(gpu.peers for gpu in gpus)
    return "each reaches the others' memory" if reached == pairs else f"{reached} of {pairs} pairs reach each other's memory"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
