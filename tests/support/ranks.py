"""Real gloo ranks for tests: processes that stay alive between tests, forked from one that has imported torch and the rest.
results = run_ranks(4, "tests.gloo.jobs:check", tp=2, pp=2) gives one result a rank, or raises a rank's error."""

import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from oppo_megatron.cluster.rank_processes import FOR_RANKS

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
PRELOADED = ["oppo_megatron.train.setup", "oppo_megatron.train.entry", "tests.e2e.jobs"]
"""What most jobs import: seconds for a process that is spawned, nothing for one that is forked."""


TELL = signal.SIGRTMIN
"""At it a rank writes where its threads are."""
LAST = (" in <module>\n", "...\n")
"""What comes last: the main thread's outermost call, or what stands for the hundredth and those around it."""


def _serve(pipe: Connection, stacks: str) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_RANKS)
    faulthandler.register(TELL, open(stacks, "w"))
    os.environ.update(ENVIRONMENT)
    import torch
    import torch.distributed as dist

    from oppo_megatron.cluster.process_groups import connect_pairs, the_world
    from oppo_megatron.cluster.world import CONNECT_LATE

    os.environ[CONNECT_LATE] = "1"  # as in a run
    torch.set_num_threads(1)
    gc.freeze()  # modules are no garbage, and a collection need not look at them
    while True:
        job = pipe.recv()
        if job is None:
            return
        rank, world, store, entry, kwargs, timeout_s = job
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
            connect_pairs(the_world())  # as in a run
            module, name = entry.split(":")
            pipe.send(("ok", getattr(importlib.import_module(module), name)(**kwargs)))
            dist.barrier()
            dist.destroy_process_group()
            let_go_of_groups()
        except BaseException as error:  # reported to the test, which raises it
            pipe.send(("error", f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
            return


def let_go_of_groups() -> None:
    """Free what ended runs leave in this process: threads of process groups wake 100 times per second.

    Two kinds of cycle hold them.  One is Python's.  The other goes through C++, which the collector does not see: a float32
    distributed optimizer holds views of its parameters, the views their graph, the graph's ends the hooks of megatron-core's DDP,
    and the hooks the optimizer.
    """
    for held in gc.get_objects():
        if type(held).__name__ == "DistributedOptimizer":
            vars(held).clear()
        elif type(held).__name__ == "DistributedDataParallel":
            held.grad_accs.clear()
    gc.collect()
    gc.freeze()  # what is left are modules and caches, which the next collection need not look at again


class RankPool:
    def __init__(self) -> None:
        self.workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.jobs = 0

    def _grow(self, world: int) -> Path:
        """Start missing ranks; return their folder, kept as long: torch waits for a removed store's file until time-out."""
        self.folder = self.folder or tempfile.TemporaryDirectory()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        while len(self.workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._stacks(len(self.workers))), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
        return Path(self.folder.name)

    def _stacks(self, rank: int) -> str:
        assert self.folder is not None
        return str(Path(self.folder.name) / f"stacks-{rank}")

    def run(self, world: int, entry: str, timeout_s: float, kwargs: dict[str, Any], deaths: bool = False) -> list[Any]:
        self.jobs += 1
        store = str(self._grow(world) / f"store-{self.jobs}")
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            pipe.send((rank, world, store, entry, kwargs, timeout_s))
        answers = self._collect(world, time.monotonic() + timeout_s, "error" if deaths else "died")
        errors = [text for kind, text in answers if kind == "error" or (kind == "died" and not deaths)]
        if errors or deaths:
            self.close()
        if errors:
            raise AssertionError("\n".join(errors))
        return [value if kind == "ok" else None for kind, value in answers]

    def _collect(self, world: int, deadline: float, worst: str) -> list[tuple[str, Any]]:
        """Answers in rank order; once one rank failed the others get a few seconds, as they may wait for it."""
        answers: list[tuple[str, Any]] = []
        for rank, (process, pipe) in enumerate(self.workers[:world]):
            if any(kind in ("error", worst) for kind, _ in answers):
                deadline = min(deadline, time.monotonic() + 5)
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    process.join()
                    answers.append(("died", f"rank {rank}: died with exit code {process.exitcode}"))
            else:
                answers.append(("error", f"rank {rank}: no answer in time; it is in\n{self._where(rank)}"))
        return answers

    def _where(self, rank: int) -> str:
        process, stacks = self.workers[rank][0], Path(self._stacks(rank))
        if not stacks.exists():
            return "its imports"
        assert process.pid is not None
        os.kill(process.pid, TELL)
        deadline = time.monotonic() + 20
        while not (text := stacks.read_text()).endswith(LAST) and time.monotonic() < deadline:
            time.sleep(0.1)
        return text

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


POOL = RankPool()


def run_ranks(world: int, entry: str, timeout_s: float = 240.0, **kwargs: Any) -> list[Any]:
    """Run `module:function(**kwargs)` on `world` gloo ranks.  Results must be picklable."""
    return POOL.run(world, entry, timeout_s, kwargs)


def run_mortal_ranks(world: int, entry: str, timeout_s: float = 120.0, **kwargs: Any) -> list[Any | None]:
    """Run as `run_ranks`, where ranks may die on purpose: their result is None."""
    return POOL.run(world, entry, timeout_s, kwargs, deaths=True)
