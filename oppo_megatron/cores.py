"""Processor cores of this process, for code with torch and without."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on, which a container or a job may have fewer of than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
