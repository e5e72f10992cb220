"""Rehearses cases: forks their ranks from a process that has loaded the stub and the libraries."""

import atexit
import functools
import inspect
import os
import shutil
import socket
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (fake tensors ask for it)
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from oppo_megatron.bench import gpu_parts
from oppo_megatron.cluster import process_groups
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.cluster.world import World
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.engine import device_decode
from oppo_megatron.engine.device_decode import DeviceLane
from oppo_megatron.engine.executor import Executor
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.engine.stream import ListenWorker
from oppo_megatron.layout.kernels import TE, TRITON
from oppo_megatron.mcore import context
from oppo_megatron.mcore.kv import paged
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights import weight_sync
from oppo_megatron.mcore.weights.weight_sync import Reallocation
from oppo_megatron.schedule.actions import Action
from oppo_megatron.train import setup, supervised
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.guard import Guard
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.supervised import SupervisedTrainer
from tests.rehearsal import device
from tests.rehearsal.asking import forked
from tests.rehearsal.cases import PLAIN, PREFERENCES, SYNC_STEPS
from tests.rehearsal.defects import DEFECTS
from tests.rehearsal.peers import Peers
from tests.rehearsal.watch import DEVICE, Watch
from tests.support.configs import run_of
from tests.support.ppo import Workspace

Report = dict[str, Any]
Work = Callable[[World], None]


def answering(peers: Peers) -> Callable[[dict[str, Any]], list[Report]]:
    """Reports of the ranks of a case, of {"config": FILE} for `oppo train`, or of {"order": FILE} for `oppo bench gpu`."""
    device_decode.SYNC_STEPS |= dict.fromkeys(device_decode.SYNC_STEPS, SYNC_STEPS)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    workspace, kept, number = Workspace.create(Path(folder)), dict[Any, Any](), count()

    def answer(asked: dict[str, Any]) -> list[Report]:
        name, size = f"{next(number)}", asked.get("ranks", 1)
        if "order" in asked:
            work: Work = partial(bench_part, Path(asked["order"]))
        elif "config" in asked:
            work = partial(train, load_config(TrainConfig, asked["config"]))
        elif asked["kind"] == "train":
            work = partial(train, run_of(workspace.config(name, **{**PLAIN, **asked["changes"]})))
        else:
            settings = workspace.files(name, "pairs") | PREFERENCES | asked["changes"]
            work = partial(train_supervised, SUPERVISED[asked["kind"]](**settings))
        plant = DEFECTS[asked["defect"]].plant if asked.get("defect") else None
        store, ring = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), asked.get("ring", False)
        reports = forked([partial(rehearse, rank, size, store.port, peers, kept, work, plant, ring) for rank in range(size)])
        for report in reports:
            kept.update(report.pop("shapes", {}))
        _add_lost_messages(reports)
        return reports

    return answer


def _add_lost_messages(reports: list[Report]) -> None:
    """A message that nobody takes keeps a stream for ever, and what comes behind it."""
    left: Counter[str] = Counter()
    for report in reports:
        left.update(report.pop("messages", {}))
    lost = {f"messages that were sent and not taken, or the reverse, over {key}": n for key, n in left.items() if n}
    for report in reports:
        if report["error"] is None:
            report["faults"] |= lost


def rehearse(
    rank: int, size: int, port: int, peers: Peers, kept: dict[Any, Any], work: Work, plant: Callable[[], None] | None,
    ring: bool,
) -> Report:  # fmt: skip
    """The work of this rank; `plant` breaks the product first.  `kept` is known of shapes before."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    watch, error = Watch(kept), None
    device.install(watch)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    peers.join(watch, store, rank, size)
    try:
        _name_phases(watch)
        _name_messages(peers)
        kernel = paged.PagedKernel(functools.partial(device.by_table, watch), functools.partial(device.turned, watch))
        paged.usable, paged.by_triton = lambda library: library == TRITON, lambda _: kernel
        if ring:
            context.usable, context.ring_of = lambda library: library == TE, device.ring_of
        if plant is not None:
            plant()
        with watch:
            process_groups.world_timeout = lambda: timedelta(seconds=60)
            weight_sync.Thread = AtOnce  # type: ignore[misc, assignment]
            hosts = tuple(RankHost(each, socket.gethostname(), None, str(DEVICE), 1, os.getpid()) for each in range(size))
            work(World(rank, size, DEVICE, hosts, Activity()))
        watch.end()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_tb(raised.__traceback__)[-14:])}"
    peers.leave()
    waits = [(*key, count) for key, count in sorted(watch.waits.items())]
    return {
        "waits": waits, "phases": dict(watch.phases), "faults": dict(watch.faults), "lines": watch.lines, "error": error,
        "shapes": watch.shapes.found, "messages": dict(peers.messages), "launches": dict(watch.launches),
        "idle": dict(watch.idle),
    }  # fmt: skip


class AtOnce:
    """In place of a thread, because fake tensors are made by one thread at a time."""

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...], **_: Any):
        self.start = partial(target, *args)


def train(config: TrainConfig, world: World) -> None:
    assert run_ppo(config, world, read_inputs(config), Preemption(config.preempt_deadline_s))


def train_supervised(config: SupervisedConfig, world: World) -> None:
    preemption = Preemption(config.preempt_deadline_s)
    assert supervised.train_supervised(config, supervised.task_of(config), world, preemption)


def bench_part(order: Path, world: World) -> None:
    gpu_parts.open_world = lambda *_: nullcontext(world)  # type: ignore[assignment]
    gpu_parts.main(str(order))


def _name_phases(watch: Watch) -> None:
    workers = {"decode": DecodeWorker, "score": ScoringWorker, "listen": ListenWorker}
    for owner, name, phase in (
        (TrainingLoop, "run", "rest"), (SupervisedTrainer, "run", "supervised"), (SupervisedTrainer, "_measure", "held out"),
        (Executor, "run", "round"),
        *((worker, name, phase) for phase, worker in workers.items() for name in ("compute", "outbox", "inbox", "end")),
        (ScoringWorker, "begin", "score"), (DecodeWorker, "begin", "decode round"), (DeviceLane, "start", "decode window"),
        (DeviceLane, "step", "decode step"), (TrainedModel, "step", "update"), (TrainedModel, "ahead", "ahead"),
        (Reallocation, "move", "move"), (ScoreExchange, "gather", "exchange"), (Guard, "examine", "experience"),
        (Saver, "snapshot", "checkpoint"), (setup, "build_loop", "start"),
    ):  # fmt: skip
        if hasattr(owner, name):
            setattr(owner, name, _in_phase(watch, getattr(owner, name), phase))


def _name_messages(peers: Peers) -> None:
    """The subject of each message of a round, by which its two ends have to agree."""

    def named(method: Callable[..., Any]) -> Callable[..., Any]:
        def of(worker: Any, action: Action) -> Any:
            peers.about = action.role, None if action.payload is None else action.payload.value
            return method(worker, action)

        return of

    for owner in (DecodeWorker, ScoringWorker, ListenWorker):
        for name in ("outbox", "inbox"):
            setattr(owner, name, named(getattr(owner, name)))
    run = Executor.run

    def then_none(*args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        peers.about = None

    Executor.run = then_none  # type: ignore[method-assign]


def _in_phase(watch: Watch, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with watch.at(phase):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def piecewise(*args: Any, **kwargs: Any) -> Iterator[Any]:
        pieces = function(*args, **kwargs)
        while True:
            with watch.at(phase):
                piece = next(pieces, pieces)
            if piece is pieces:
                return
            yield piece

    return piecewise if inspect.isgeneratorfunction(function) else within
