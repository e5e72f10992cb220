"""The machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from oppo_megatron.cores import processor, usable_cores

PACKAGES = ("torch", "megatron-core", "transformers")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, devices, versions, and how busy the machine is with other work at the moment."""
    cores = usable_cores()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": processor()[1] or platform.machine(),
        "usable_cores": cores,
        "cuda_devices": devices,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
