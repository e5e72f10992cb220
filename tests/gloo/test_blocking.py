"""A rank that waits for another is told from one that hangs, whatever its stretch of work is marked as."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from oppo_megatron.cluster.activity import Activity, Doing
from oppo_megatron.engine.executor import Executor, build_links
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site
from tests.gloo.jobs_executor import Parrot
from tests.support.ranks import run_ranks

PATIENCE_S = 30.0


def look_at_waits(folder: str) -> dict[str, Doing]:
    """The waits of rank 0 for the late rank 1, and where rank 1 is, which comes once rank 0 has been looked at in its call."""
    found: dict[str, Doing] = {}
    for name, call in _calls(folder).items():
        dist.barrier()
        activity = Activity(by_stack=True)
        look = threading.Thread(target=_look, args=(activity, name, Path(folder), found))
        with activity.doing("a wait for scores", waits=True):
            look.start()
            if dist.get_rank() == 1:
                _until((Path(folder) / f"looked at {name}").exists)
                look.join()
            call()
        look.join()
    return found


def _look(activity: Activity, name: str, folder: Path, found: dict[str, Doing]) -> None:
    if dist.get_rank() == 1:
        found[name] = activity.look()
        return
    _until((folder / "hanging").exists if name == "hangs" else lambda: activity.look().waits)
    found[name] = activity.look()
    (folder / f"looked at {name}").touch()


def _until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def _calls(folder: str) -> dict[str, Callable[[], Any]]:
    rank = dist.get_rank()
    links = build_links(Site({"actor": RolePlacement((0, 1), pp=2)}))
    parrot = Parrot(None, None, random.Random())
    executor = Executor(rank, {"actor": parrot}, links, 60.0, torch.device("cpu"), lambda *_: None)

    def message() -> None:
        op, peer = (Op.SEND, 0) if rank else (Op.RECV, 1)
        executor.run([Action(rank, op, "actor", 0, 0, payload=Payload.TOKENS, peer=peer)])
        executor.drain()

    def hangs() -> None:
        if rank == 0:
            (Path(folder) / "hanging").touch()
            _until((Path(folder) / "looked at hangs").exists)

    return {
        "broadcast": lambda: dist.broadcast(torch.zeros(1), 1),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None, None], "mine"),
        "weights": lambda: checkpoint.save({"weight": torch.zeros(1)}, checkpoint_id=str(Path(folder) / "weights")),
        "message": message,
        "hangs": hangs,
    }


def test_a_wait_is_told_from_the_stack(tmp_path: Path) -> None:
    waiting, late = run_ranks(2, "tests.gloo.test_blocking:look_at_waits", folder=str(tmp_path))
    assert not any(doing.waits for doing in late.values()), late
    assert {name: doing.waits for name, doing in waiting.items()} == {name: name != "hangs" for name in waiting}
    told = {name: doing.what.removeprefix("a wait for scores") for name, doing in waiting.items()}
    assert told["broadcast"] == ", in broadcast" and told["all_gather_object"] == ", in all_gather_object"
    assert told["weights"].endswith("_object") and told["hangs"] == "", told
