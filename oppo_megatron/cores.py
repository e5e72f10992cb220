"""Processor cores and memory available to this process."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

CONNECTIONS, MOST_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""The variable for a CUDA device's hardware queues and its maximum (CUDA's default is 8); torch has as many streams."""
GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores of this process, container or job."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, cpu_quotas(MEMBERSHIP, GROUPS))]))


def threads_of_rank(configured: int, local_ranks: int) -> int:
    """As configured, else by the environment, else an equal share."""
    return configured or asked_threads() or max(1, usable_cores() // local_ranks)


def asked_threads(environment: Mapping[str, str] = os.environ) -> int:
    """OMP_NUM_THREADS, else MKL_NUM_THREADS, else 0."""
    asked = (environment.get(name, "").partition(",")[0].strip() for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return next((int(number) for number in asked if number.isdecimal() and int(number)), 0)


def has_cuda(devices: Path = Path("/dev")) -> bool:
    """Does not load torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    version = Path(spec.origin).with_name("version.py")
    built = version.is_file() and re.search(r"^cuda\b.*=\s*['\"]", version.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(built) and any((devices / name).exists() for name in ("nvidiactl", "nvidia0", "dxg"))


def processor() -> tuple[str, str, str]:
    """Vendor, model name and flags; empty if unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return found.get("vendor_id", ""), found.get("model name", ""), found.get("flags", "")


def set_exact_products() -> None:
    """Keep results of MKL's AVX2 kernels independent of where their inputs lie in memory, so that a run repeats to the bit."""
    vendor, _, flags = processor()
    if vendor == "GenuineIntel" and "avx512f" not in flags.split():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def host_bytes() -> int:
    """Bytes of the host, job or container."""
    return min([int(psutil.virtual_memory().total), *group_limits(MEMBERSHIP, GROUPS)])


def group_limits(membership: Path, groups: Path) -> Iterator[int]:
    """Bytes allowed by control groups (v1, v2) and their parents."""
    for group, first in _control_groups("memory", membership, groups):
        file = group / ("memory.limit_in_bytes" if first else "memory.max")
        if file.is_file() and (limit := file.read_text().strip()).isdigit():
            yield int(limit)  # "max": none


def cpu_quotas(membership: Path, groups: Path) -> Iterator[float]:
    """In cores."""
    for group, first in _control_groups("cpu", membership, groups):
        files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if first else ["cpu.max"]
        if all((group / file).is_file() for file in files):
            quota, period = " ".join((group / file).read_text() for file in files).split()
            if quota.isdigit() and int(period):  # "max" or -1: none
                yield int(quota) / int(period)


def _control_groups(controller: str, membership: Path, groups: Path) -> Iterator[tuple[Path, bool]]:
    lines = membership.read_text().splitlines() if membership.exists() else []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        root = groups / controller if controllers else groups
        inside = root / path.lstrip("/")
        for group in (inside, *inside.parents):
            if root not in (group, *group.parents):
                break
            yield group, bool(controllers)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, which would scan many live objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
