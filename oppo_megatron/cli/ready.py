"""Check this machine and the run directory before any rank starts, without torch on a CPU; show the ranks and their roles."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

from oppo_megatron.cli.launch import check_world_size, external_ranks, speaks_for_all
from oppo_megatron.cli.measure import check_devices, on_cpu
from oppo_megatron.config.evaluation import EvaluationConfig
from oppo_megatron.config.load import plain_settings
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.paths import named_paths
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.cores import host_bytes
from oppo_megatron.errors import ConfigError
from oppo_megatron.evaluation.tasks import find_tasks
from oppo_megatron.layout.kernels import import_fault
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import Memory, shortage
from oppo_megatron.layout.placements import world_size
from oppo_megatron.layout.role_memory import (
    Holding,
    lasting_memory,
    rank_memory,
    supervised_holdings,
    train_holdings,
    written_bytes,
)
from oppo_megatron.plugins import SIGNATURES, Plugin
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.logs.trackers import check_trackers

SERVICE_PACKAGES = {"fastapi": ("fastapi:FastAPI",), "uvicorn": ("uvicorn:Server",)}
"""Packages that a service needs, with the names used from each."""
LEAST_FREE = 2**20
"""Bytes that every run writes: configuration, metrics, trace and tokenizers."""
REACH_S = 2.0


def require_ready(settings: TrainSettings | SupervisedConfig, config: TrainConfig | SupervisedConfig | None) -> None:
    """Raise ConfigError with all reasons why this machine cannot run it; `config` None: ranks unknown."""
    problems: list[str] = []

    def collect(check: Callable[..., object], *given: object) -> None:
        try:
            check(*given)
        except ConfigError as error:
            problems.extend(error.problems)

    run = RunDirectory(settings.run_dir)
    if isinstance(settings, TrainSettings):
        for setting in SIGNATURES:
            chosen = reduce(getattr, setting.split("."), settings)
            if isinstance(chosen, Mapping) or ":" in (chosen or ""):
                collect(Plugin.load, setting, chosen)
    collect(check_trackers, settings.logging)
    collect(require_startable, config or settings, run)
    if config is not None:
        collect(check_world_size, world_size(config))
    collect(check_devices, settings.runtime.device, *((1, "") if config is None else (world_size(config), on_one_rank(config))))
    if not problems and config is not None:
        if on_cpu(config.runtime.device) and external_ranks(os.environ) is None:  # other ranks check themselves
            problem = shortage(lasting_memory(config, on_cpu=True), host_bytes(), "all ranks", socket.gethostname())
            problems += [problem] if problem else []
        collect(run.require_space, LEAST_FREE + int(written_bytes(config)))
    if problems:
        raise ConfigError(problems)


def require_task_data(settings: TrainSettings | SupervisedConfig) -> None:
    """Raise ConfigError if a task of the evaluation cannot be measured."""
    evaluation = settings.evaluation
    if isinstance(evaluation, EvaluationConfig) and evaluation.tasks and speaks_for_all(os.environ):
        find_tasks(evaluation.tasks, evaluation.task_data, "evaluation.task_data", read=True)


def require_startable(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> None:
    """Raise ConfigError if files in the run directory would be overwritten or cannot be resumed."""
    run.require_own()
    run.require_apart(named_paths(config))
    if not config.resume:
        run.require_unfinished()
        run.require_no_checkpoints()
        return
    wanted, wrote = "actor" if isinstance(config, TrainSettings) else "model", run.settings().keys()
    if wanted not in wrote and wrote & {"actor", "model"}:
        theirs = "`oppo train`" if "actor" in wrote else "`oppo sft`, `rm` or `dpo`"
        raise ConfigError(
            f"run_dir: {run.path} holds a run of {theirs}, which another command cannot continue; choose another run_dir, or "
            "give that command its own configuration"
        )
    if not run.finished or ended_here(config, run):  # a run that has ended here needs no start, and that is not an error
        return
    steps, ended = config.steps, run.ended_after
    if not run.has_checkpoints:
        raise ConfigError(
            f"run_dir: {run.path} holds a finished run without checkpoints (checkpoint.final was off), which cannot be given "
            "more steps; choose another run_dir, or start from its weights"
        )
    if steps is not None and ended is not None and steps <= ended:
        raise ConfigError(
            f"steps is {steps}, and the run in {run.path} has ended after {ended}: there is nothing to train; set steps to more "
            f"than {ended} to continue it, or choose another run_dir"
        )


def ended_here(config: TrainSettings | SupervisedConfig, run: RunDirectory) -> bool:
    """True if this run has already ended in its directory: a program that restarts it needs no error then."""
    then, now = run.settings(), plain_settings(config)
    return bool(run.finished and then == now)


def on_one_rank(config: TrainConfig | SupervisedConfig) -> str:
    def sizes(tree: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from sizes(value, f"{path}{key}.")
            elif key in Sizes._fields and (value or 1) > 1:
                yield f"{path}{key}=1"
            elif key == "sequence_parallel" and value:
                yield f"{path}{key}=false"
            elif key == "ranks" and isinstance(value, str):
                yield f"{path}{key}=null"

    tree = config.model_dump()
    return " ".join([*(["placement.mode=single"] if "placement" in tree else []), *sizes(tree, "")])


def require_service_packages() -> None:
    faults = [f"{name} {fault}" for name, used in SERVICE_PACKAGES.items() if (fault := import_fault(*used))]
    if faults:
        raise ConfigError(
            f"`oppo serve` needs fastapi and uvicorn, but {' and '.join(faults)}; install what services need: "
            "pip install 'oppo-megatron[serve]', or pip install '.[serve]' in a copy of the source"
        )


def unreached_services(settings: TrainSettings) -> Iterator[str]:
    """Yield a warning for each reward service that refuses connections; it may be started later."""
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


Row = tuple[str, ...]
MEMORY_HEADINGS: Row = (
    "rank", "role", "tp", "pp", "dp", "layers",
    "weights", "copy", "packed", "kernels", "grads", "Adam", "KV", "buffers", "activations", "total",
)  # fmt: skip
BATCH_HEADINGS: Row = (
    "rollout batch B", "B + delta", "sequences a replica", "KV slots", "decode m-batches", "minibatch rows", "rows a batch",
    "rows a replica", "micro-batch tokens", "chunk C", "prefill tokens",
)  # fmt: skip
"""All batch sizes, in column order; unused columns are left out."""
MEBIBYTE = 2**20


def rank_table(config: TrainConfig | SupervisedConfig) -> list[str]:
    """Memory, then batch sizes, with a row per rank and one per role below it."""
    on_host = on_cpu(config.runtime.device)
    if isinstance(config, TrainConfig):
        holdings = train_holdings(config, on_cpu=on_host)
    else:
        holdings = supervised_holdings(config, on_cpu=on_host)
    memory, totals = [MEMORY_HEADINGS], rank_memory(holdings)
    for rank, group in groupby(holdings, key=lambda holding: holding.rank):
        held = list(group)
        if len(held) > 1:
            memory.append((str(rank), "all", "", "", "", "", *_mebibytes(totals[rank])))
        memory += [("" if len(held) > 1 else str(rank), *_share(each), *_mebibytes(each.memory)) for each in held]
    return [
        "Memory of each rank in MiB, without interpreter, libraries and a GPU's context (copy: weights of a training layout of",
        "its own; packed: weights laid out for a CPU's products, kernels: what those keep; buffers: rotary tables and what",
        "sequence parallelism gathers; activations: of the largest micro-batch of the update or of cached calls; roles compute",
        "in turn, so of kernels and activations a rank's total has the largest only):",
        *_aligned(memory),
        "Batch sizes (rows: of an optimizer step; m-batches: micro-batches; auto: as the measured times decide):",
        *_aligned(_batch_rows(holdings)),
    ]


def _share(held: Holding) -> Row:
    """The role, its part of each kind of parallelism, from 1: `tp 1/2`, and its layers."""
    coords, sizes = held.coords, held.sizes
    parts = ((coords.shard, sizes.tp), (coords.stage, sizes.pp), (coords.replica, sizes.dp * sizes.cp))
    layers = ",".join(f"{c.start + 1}-{c.stop}" if len(c) > 1 else str(c.stop) for c in held.layers)
    return held.role, *(f"{part + 1}/{count}" for part, count in parts), layers


def _mebibytes(memory: Memory) -> Row:
    found = [size / MEBIBYTE for size in (*vars(memory).values(), memory.total)]
    return tuple("-" if size == 0 else f"{size:.2f}" if size < 100 else f"{size:.0f}" for size in found)


def _batch_rows(holdings: Sequence[Holding]) -> list[Row]:
    """Two lines of headings, split at their last space, then rows per role; equal ranks share them."""
    used = [heading for heading in BATCH_HEADINGS if any(heading in held.batches for held in holdings)]
    words = [heading.rpartition(" ") for heading in used]
    rows: list[Row] = [("", "", *(first for first, _, _ in words)), ("rank", "role", *(last for _, _, last in words))]
    ranks_of: dict[tuple[Row, ...], list[int]] = {}
    for rank, group in groupby(holdings, key=lambda holding: holding.rank):
        own = tuple((held.role, *(held.batches.get(heading, "-") for heading in used)) for held in group)
        ranks_of.setdefault(own, []).append(rank)
    for own, ranks in ranks_of.items():
        rows += [("" if index else format_ranks(ranks), *row) for index, row in enumerate(own)]
    return rows


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Align columns two spaces apart, names left and numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [x.ljust(width) if i == 1 else x.rjust(width) for i, (x, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
