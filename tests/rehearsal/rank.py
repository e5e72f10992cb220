"""One rank of a rehearsal, in a process that has loaded the stub and is thrown away afterwards."""

from __future__ import annotations

import functools
import inspect
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from oppo_megatron.cluster import process_groups
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.schedule.actions import Action
from oppo_megatron.train import supervised
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.saving.preemption import Preemption
from tests.rehearsal import device
from tests.rehearsal.peers import Peers
from tests.rehearsal.shapes import Kept
from tests.rehearsal.watch import DEVICE, Watch

Report = dict[str, Any]
Work = Callable[[World], None]


def rehearse(
    rank: int, size: int, store: dist.Store, peers: Peers, kept: Kept, work: Work, plant: Callable[[], None] | None
) -> Report:
    """The work of this rank; `plant` breaks the product first.  `kept` is known of shapes before."""
    watch, error = Watch(kept), None
    device.install(watch)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    peers.join(watch, store, rank, size)
    try:
        _name_phases(watch)
        _name_messages(peers)
        if plant is not None:
            plant()
        with watch:
            process_groups.world_timeout = lambda: timedelta(seconds=60)
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


def train(config: TrainConfig, world: World) -> None:
    assert run_ppo(config, world, read_inputs(config), Preemption(config.preempt_deadline_s))


def train_supervised(config: SupervisedConfig, world: World) -> None:
    preemption = Preemption(config.preempt_deadline_s)
    assert supervised.train_supervised(config, supervised.task_of(config), world, preemption)


def bench_part(order: Path, world: World) -> None:
    from oppo_megatron.bench import gpu_parts

    gpu_parts.open_world = lambda *_: nullcontext(world)  # type: ignore[assignment]
    gpu_parts.main(str(order))


def _name_phases(watch: Watch) -> None:
    from oppo_megatron.engine.device_decode import DeviceLane
    from oppo_megatron.engine.executor import Executor
    from oppo_megatron.engine.generation import DecodeWorker
    from oppo_megatron.engine.scoring import ScoringWorker
    from oppo_megatron.engine.stream import ListenWorker
    from oppo_megatron.mcore.training import TrainedModel
    from oppo_megatron.mcore.weights.weight_sync import Reallocation
    from oppo_megatron.train import setup
    from oppo_megatron.train.guard import Guard
    from oppo_megatron.train.loop import TrainingLoop
    from oppo_megatron.train.saving.saver import Saver
    from oppo_megatron.train.score_exchange import ScoreExchange
    from oppo_megatron.train.supervised import SupervisedTrainer

    workers = {"decode": DecodeWorker, "score": ScoringWorker, "listen": ListenWorker}
    for owner, name, phase in (
        (TrainingLoop, "run", "rest"),
        (SupervisedTrainer, "run", "supervised"),
        (SupervisedTrainer, "_measure", "held out"),
        (Executor, "run", "round"),
        *((worker, name, phase) for phase, worker in workers.items() for name in ("compute", "outbox", "inbox", "end")),
        (ScoringWorker, "begin", "score"),
        (DecodeWorker, "begin", "decode round"),
        (DeviceLane, "start", "decode window"),
        (DeviceLane, "step", "decode step"),
        (TrainedModel, "step", "update"),
        (TrainedModel, "ahead", "ahead"),
        (Reallocation, "move", "move"),
        (ScoreExchange, "gather", "exchange"),
        (Guard, "examine", "experience"),
        (Saver, "snapshot", "checkpoint"),
        (setup, "build_loop", "start"),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _in_phase(watch, getattr(owner, name), phase))


def _name_messages(peers: Peers) -> None:
    """The subject of each message of a round, by which its two ends have to agree."""
    from oppo_megatron.engine.executor import Executor
    from oppo_megatron.engine.generation import DecodeWorker
    from oppo_megatron.engine.scoring import ScoringWorker
    from oppo_megatron.engine.stream import ListenWorker

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
