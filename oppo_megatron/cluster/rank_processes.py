"""Rank processes of a host: forked from a server with imports done, or spawned on CUDA, which survives no fork."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Literal

import psutil

from oppo_megatron.processes import end_with_parent

StartMethod = Literal["forkserver", "spawn"]
PRELOADED = ["oppo_megatron.cluster.fork_server", "oppo_megatron.train.entry"]
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Exist if there may be a GPU (NVIDIA, WSL, AMD)."""
LONGEST_FOLDER = 108 - len("/pymp-12345678/listener-12345678") - 1
"""Most bytes of a folder for sockets of `multiprocessing` (a socket's name has 108, the last one 0)."""
FOR_RANKS = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals for the ranks and their launcher, not for the fork server."""


def start_method(config: Any, environment: Mapping[str, str] = os.environ) -> StartMethod:
    """Does not import torch."""
    device = config.runtime.device if hasattr(config, "runtime") else "cpu"
    hidden = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    on_gpu = device == "cuda" or (device == "auto" and not hidden and any(path.exists() for path in DRIVERS))
    too_long = len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER
    return "spawn" if on_gpu or too_long or sys.platform != "linux" else "forkserver"


def begin_fork_server() -> None:
    """Start it without waiting; it ignores SIGINT and the ranks' signals."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # it would unblock signals if it were started later
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {*FOR_RANKS, signal.SIGINT})
    os.environ["OPPO_LAUNCHER"] = str(os.getpid())  # for `cluster.fork_server`
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["OPPO_LAUNCHER"]
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def await_fork_server() -> None:
    first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    first.start()
    first.join()


@dataclass(frozen=True)
class Surroundings:
    """A launcher's environment, stdout and stderr."""

    environment: Mapping[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        files = {}
        for number in (1, 2):
            with suppress(OSError):  # it is closed
                os.fstat(number)
                files[number] = DupFd(number)
        return _taken_over, (self.environment, files)


def _taken_over(environment: Mapping[str, str], files: Mapping[int, Any]) -> Surroundings:
    """Run in the rank, before torch's agent adds RANK."""
    for number, file in files.items():
        given = file.detach()
        if given != number:  # a spawned process has it already
            os.dup2(given, number)
            os.close(given)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_RANKS)  # which the fork server ignores
    return Surroundings(environment)


def end_with_launcher() -> None:
    """End this rank with its launcher; called first."""
    end_with_parent()
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "another launcher's ranks end as that one has them end"
    sentinel = launcher.sentinel

    def end_after() -> None:
        connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_after, name="launcher", daemon=True).start()


def rank_processes(launcher: psutil.Process) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        for child in launcher.children():
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                if "multiprocessing.spawn" in command:
                    yield child
                elif "multiprocessing.forkserver" in command:
                    yield from child.children()
                else:
                    yield from rank_processes(child)
