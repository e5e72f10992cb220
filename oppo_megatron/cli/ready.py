"""The checks of `oppo train` and of supervised training before any rank starts, and of `oppo validate`: one function.

`load_settings` checks the configuration's text, files and shapes; this file checks the machine.  It loads no torch, unless the
run computes on CUDA devices.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from oppo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig, TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig

SERVICE_PACKAGES = {"fastapi": ("fastapi:FastAPI",), "uvicorn": ("uvicorn:Server",)}
"""Packages that a service needs, with the names used from each."""
LEAST_FREE = 2**20
"""Bytes that every run writes: its configuration, metrics, trace and tokenizers."""
REACH_S = 2.0


def require_ready(settings: TrainSettings | SupervisedConfig, config: TrainConfig | SupervisedConfig | None) -> None:
    """Raise ConfigError with all reasons why this machine cannot run it; `config` is None if the ranks are still to be chosen."""
    from oppo_megatron.cli.launch import check_world_size
    from oppo_megatron.cli.measure import check_devices
    from oppo_megatron.cli.startable import require_startable
    from oppo_megatron.layout.holdings import written_bytes
    from oppo_megatron.layout.placements import world_size
    from oppo_megatron.rundir.directory import RunDirectory
    from oppo_megatron.train.logs.trackers import check_trackers

    problems: list[str] = []

    def collect(check: Callable[..., None], *given: object) -> None:
        try:
            check(*given)
        except ConfigError as error:
            problems.extend(error.problems)

    run = RunDirectory(settings.run_dir)
    collect(check_trackers, settings.logging)
    collect(require_startable, config or settings, run)
    if config is not None:
        collect(check_world_size, world_size(config))
    collect(check_devices, settings.runtime.device, *((1, "") if config is None else (world_size(config), on_one_rank(config))))
    if not problems and config is not None:
        problems += _memory_problems(config)
        collect(run.require_space, LEAST_FREE + int(written_bytes(config)))
    if problems:
        raise ConfigError(problems)


def on_one_rank(config: TrainConfig | SupervisedConfig) -> str:
    """Return the overrides that put a run on one rank."""

    def sizes(tree: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from sizes(value, f"{path}{key}.")
            elif key in ("tp", "pp", "dp", "vpp") and (value or 1) > 1:
                yield f"{path}{key}=1"
            elif key == "ranks" and isinstance(value, str):
                yield f"{path}{key}=null"

    tree = config.model_dump()
    return " ".join([*(["placement.mode=single"] if "placement" in tree else []), *sizes(tree, "")])


def require_service_packages() -> None:
    """Raise ConfigError if the packages that a service needs to listen cannot be imported."""
    from oppo_megatron.layout.kernels import import_fault

    faults = [f"{name} {fault}" for name, used in SERVICE_PACKAGES.items() if (fault := import_fault(*used))]
    if faults:
        raise ConfigError(
            f"`oppo serve` needs fastapi and uvicorn, but {' and '.join(faults)}; install what services need: "
            "pip install 'oppo-megatron[serve]', or pip install '.[serve]' in a copy of the source"
        )


def unreached_services(settings: TrainSettings) -> Iterator[str]:
    """Yield a warning for each reward service that refuses connections; it may still be started before the run needs it."""
    for number, part in enumerate(settings.rewards):
        if part.kind != "http" or part.url is None:
            continue
        url = urlsplit(part.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            socket.create_connection((url.hostname or "", port), timeout=REACH_S).close()
        except OSError as error:
            yield (
                f"warning: rewards.{number}.url: {url.hostname}:{port} takes no connection now ({error.strerror or error}); "
                "start the service before the run, or correct the address"
            )


def _surely_on_cpu(device: str) -> bool:
    """True if the run certainly computes on CPUs; checked without torch, which finds no device if there is no driver."""
    if device == "auto":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return True
    return device == "cpu"


def _memory_problems(config: TrainConfig | SupervisedConfig) -> Iterator[str]:
    """Yield a problem if the run's ranks on this host's CPUs certainly need more memory than it has.  Ranks of other
    launchers and ranks on devices check this themselves."""
    from oppo_megatron.cli.launch import external_ranks
    from oppo_megatron.cores import host_bytes
    from oppo_megatron.layout.holdings import lasting_memory
    from oppo_megatron.layout.memory import shortage

    if _surely_on_cpu(config.runtime.device) and external_ranks(os.environ) is None:
        held = lasting_memory(config, on_cpu=True)
        if problem := shortage(held, host_bytes(), "all ranks", socket.gethostname()):
            yield problem
