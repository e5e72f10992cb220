"""This process's memory, on its CUDA device or resident on the host."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from oppo_megatron.cores import host_bytes

STATUS = Path("/proc/self/status")


def held_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes(STATUS)


def device_bytes(device: torch.device) -> int:
    """Bytes of the device, or of the host, job or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()


def peak_resident_bytes(status: Path) -> int:
    """Bytes; `getrusage` is the fallback, because it counts from before `exec`."""
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):  # "VmHWM:     5412 kB", which are KiB
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
