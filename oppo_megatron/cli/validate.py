"""`oppo validate`: every check of a configuration and its data that needs no model; without a file, of this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from oppo_megatron.cli.load import guess_kind, load_service, load_settings
from oppo_megatron.cli.measure import describe_options, resolve_placement
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.cli.ready import rank_table, require_ready, require_service_packages, require_task_data, unreached_services
from oppo_megatron.clock import by_time
from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.derived import describe_batch
from oppo_megatron.config.describe import COMMANDS
from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Rows, describe_seen, load_rows, num_duplicates, read_heldout
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.layout.kernels import APEX, FLASH, TE, TRITON, USED, find_available, import_fault, kernel_table
from oppo_megatron.preflight.gpus import Gpu, Problem, TorchBuild, describe, problems, read_host
from oppo_megatron.preflight.validate import Role, compare_with_roles, train_roles
from oppo_megatron.serving.scorers import try_parts
from oppo_megatron.train.inputs import describe_first, describe_inputs, describe_quarantine, read_inputs, try_answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="default: none; then versions, devices and what this machine lacks are shown")
    parser.add_argument("--kind", choices=COMMANDS, help="the command it is for; default: by its keys")
    parser.add_argument("--elsewhere", action="store_true", help="do not check the devices, memory and disk of this machine")
    parser.add_argument(
        "--skip-data", action="store_true", help="leave the rows of the data unread, and rewards and tokens unasked for"
    )


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        return check_machine()
    kind = args.kind or guess_kind(args.config, args.overrides)
    if kind == "serve":
        lines = _service_lines(args.config, args.overrides, skip_data=args.skip_data)
    else:
        lines = _run_lines(kind, args)
    for line in lines:
        print(line)
    print(f"OK: {args.config} is a valid configuration for `oppo {kind}`")
    if args.kind is None and kind in ("sft", "rm"):
        print("the kind is by its keys and its first row; --kind sft or --kind rm checks it for that command")
    return 0


def _run_lines(kind: str, args: argparse.Namespace) -> Iterator[str]:
    """Check a run's configuration; yield lines about its ranks, tokenizer and rows."""
    settings = load_settings(kind, args.config, args.overrides)
    config = resolve_placement(settings, measure=False)
    if args.elsewhere:
        require_ready(settings.with_values({"runtime.device": "auto"}), None)
    else:
        require_ready(settings, config)
    yield from describe_options(settings) if config is None else rank_table(config)
    if isinstance(settings, TrainSettings):
        roles = list(train_roles(settings.resolved() or settings.with_placement(PlacementConfig(mode="single"))))
    else:
        roles = [Role(name, model, scalar=settings.SCALAR) for name, model in settings.models.items()]
    yield from compare_with_roles(settings.tokenizer, roles)[1]
    if args.skip_data:
        return
    if not isinstance(settings, TrainSettings):
        yield from _supervised_rows(settings)
        return
    require_task_data(settings)
    inputs = try_answers(read_inputs(settings, by_time()), settings)
    yield describe_batch(settings)
    yield from (*describe_inputs(inputs), *describe_first(inputs.quarantine), *unreached_services(settings))


def _service_lines(path: Path, overrides: Sequence[str], *, skip_data: bool) -> Iterator[str]:
    config = load_service(path, overrides)
    require_service_packages()
    yield f"listens on {config.host}, port {config.port}, {'with' if config.token_env else 'without'} a token"
    if config.reward is not None and config.tokenizer is not None:
        yield from compare_with_roles(config.tokenizer, [Role("reward", config.reward, scalar=True)])[1]
    if not skip_data:
        yield from try_parts(config, os.environ)


def _supervised_rows(settings: SupervisedConfig) -> list[str]:
    """Read all rows as the run does; return lines about them."""
    quarantine, tokenizer = Quarantine(progress=by_time()), load_tokenizer(settings.tokenizer, settings.model.checkpoint)

    def read(data: DataConfig) -> Rows[Any]:
        return load_rows(settings, data, tokenizer, quarantine)

    every = read(settings.data)
    set_aside = len(quarantine)
    rows, held = read_heldout(settings.evaluation, settings.seed, every, read)
    found = f"data: {len(rows)} rows, {num_duplicates(rows)} of them duplicates; {set_aside} rows set aside"
    if settings.evaluation is not None:
        found += f"; {len(held)} rows held out, {min(len(held), settings.evaluation.most_rows)} of them measured"
    if further := len(quarantine) - set_aside:
        found += f"; {further} more of the held-out files set aside"
    seen = describe_seen((row[0] for row in held), (row[0] for row in rows))
    return [found, *seen, *describe_quarantine(quarantine), *describe_first(quarantine)]


@dataclass(frozen=True)
class Package:
    """A distribution, the names used from it, and the features lost without it (None: required)."""

    distribution: str
    used: tuple[str, ...]
    lost: str | None = None


PACKAGES = (
    Package("torch", ("torch:Tensor",)),
    Package("megatron-core", ("megatron.core:ModelParallelConfig",)),
    Package("transformers", ("transformers:PreTrainedTokenizerFast",)),
    Package(
        TE, USED[TE], "its layers, norms and ring attention, fused Adam and gradient norms on GPU: apex's or torch's are used"
    ),
    Package(APEX, USED[APEX], "NVIDIA's fused Adam and gradient norms on GPU: transformer-engine's or torch's are used"),
    Package(FLASH, USED[FLASH], "its attention over paged KV caches on GPU, by versions from 2.5 to 2.x: by triton"),
    Package(
        TRITON, USED[TRITON], "gated activations and KV caches in one kernel on GPU; without flash-attn, too, caches are dense"
    ),
    Package("wandb", ("wandb:init",), "logging.trackers: install the extra `wandb`"),
    Package("datasets", ("datasets:load_from_disk",), "Hugging Face data set folders as input: install the extra `datasets`"),
    Package("pyarrow", ("pyarrow.parquet:ParquetFile",), "Parquet and zstd files as input: install the extra `parquet`"),
    Package("lm-eval", ("lm_eval.tasks:TaskManager",), "tasks of lm-evaluation-harness: install the extra `lm-eval`"),
    Package("math-verify", ("math_verify:parse", "math_verify:verify"), "rule `math`: install the extra `math`"),
    Package("fastapi", ("fastapi:FastAPI",), "`oppo serve`: install the extra `serve`"),
    Package("uvicorn", ("uvicorn:Server",), "`oppo serve`: install the extra `serve`"),
)

PRESENT = "present"
"""Version of an importable module that is not an installed distribution."""


def check_machine() -> int:
    """Return 1 if something that every run needs is missing."""
    print(f"python {platform.python_version()}  {sys.executable}")
    memory = psutil.virtual_memory()
    free = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory free"
    print(f"machine: {platform.machine()}, {usable_cores()} usable cores, {free}")
    versions = {package.distribution: version_of(package) for package in PACKAGES}
    for distribution, version in versions.items():
        print(f"{distribution}: {version or 'absent'}")
    build, host, missing = None, read_host(os.environ), list[Problem]()
    if versions["torch"]:
        import torch
        import torch.distributed as dist

        build = torch_build()
        missing = problems(build, host)
        if not torch.cuda.is_available():
            built = "this torch is built for the CPU" if torch.version.cuda is None else "torch finds no device"
            print(f"cuda: off, {built}; runs use gloo and float32")
        gloo = "yes" if dist.is_available() and dist.is_gloo_available() else "no"
        nccl = "yes" if dist.is_available() and dist.is_nccl_available() else "no (needed for GPUs only)"
        print(f"back ends: gloo {gloo}, nccl {nccl}")
        print(f"torch threads: {torch.get_num_threads()}", *describe(build, host), sep="\n")
    for kernels in kernel_table(find_available(build is not None and bool(build.gpus))):
        print(f"{kernels.part}: {kernels.used}" + (f"; off is {kernels.lacking}" if kernels.lacking else ""))
    print("features that are off:")
    for package in PACKAGES:
        if package.lost is not None and (fault := import_fault(*package.used)):
            print(f"  - {package.distribution} {fault}; without it: {package.lost}")
    if missing:
        print("missing for GPUs:", *(f"  - {problem.text}" for problem in missing), sep="\n")
    if required := unmet_requirements():
        print(
            f"not ready: needed are {'; '.join(required)}. Run `pip install oppo-megatron`; in a container whose torch must "
            "stay as it is, `pip install --no-deps` of each"
        )
        return 1
    if any(problem.stops for problem in missing):
        print("not ready: the GPUs cannot be used (above); with runtime.device=cpu they are left alone")
        return 1
    print("ready")
    return 0


def unmet_requirements() -> list[str]:
    try:
        lines = metadata.requires("oppo-megatron") or []
    except metadata.PackageNotFoundError:  # a source tree on the path
        lines = [package.distribution for package in PACKAGES if package.lost is None]
    modules = {package.distribution: package for package in PACKAGES}
    found = []
    for needed in map(Requirement, lines):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = version_of(modules.get(needed.name, Package(needed.name, (needed.name,))))
        if version is None:
            found.append(f"{needed.name}{needed.specifier}, which is absent")
        elif version != PRESENT and not needed.specifier.contains(version, prereleases=True):  # such as the torch of a container
            found.append(f"{needed.name}{needed.specifier}, but {version} is installed")
    return found


def version_of(package: Package) -> str | None:
    """Installed version, `PRESENT` for a bare module, or None."""
    try:
        return metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return None if import_fault(*package.used) else PRESENT


def torch_build() -> TorchBuild:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return TorchBuild(torch.version.cuda)
    nccl = dist.is_available() and dist.is_nccl_available()
    numbers = range(torch.cuda.device_count())
    gpus = []
    for number in numbers:
        device = torch.cuda.get_device_properties(number)
        peers = sum(torch.cuda.can_device_access_peer(number, other) for other in numbers if other != number)
        gpus.append(Gpu(device.name, device.total_memory, (device.major, device.minor), peers))
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    return TorchBuild(torch.version.cuda, tuple(torch.cuda.get_arch_list()), version, tuple(gpus))
