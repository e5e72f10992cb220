"""The cost of a gloo process group for each rank, measured, and the cost of a large run's groups, computed from it.

    python -m benchmarks.groups --ranks 2 4 8 16 --alone 1024 16384 --runs 8 128 1024 4096 16384

Ranks are processes of this machine.  Each makes `--groups` groups of all ranks, connects them as a run does and sums a number
over each; then it calls `new_group` as often for groups that it does not belong to.  This is done twice: as in runs (two ranks
connect in their first message) and as torch does by default (all pairs connect when a group is made).  A group that
connects later needs no peers: `--alone` makes one of that many ranks in a single process.  `CLIENTS` processes ask the store at
once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.dry_run import Cluster
from oppo_megatron.cluster.process_groups import connect_pairs, new_group, the_world
from oppo_megatron.cluster.world import CONNECT_LATE
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import GroupName, role_placements, training_placements, world_size
from oppo_megatron.report.comparison import format_table
from oppo_megatron.schedule.links import lanes_of, run_groups
from oppo_megatron.schedule.rounds import Site

LATE, AT_ONCE = "in the first message", "all pairs at once"
MEASURED = {
    "connects": "how", "ranks": "ranks", "threads": "threads", "files": "files", "store operations": "operations",
    "made in ms": "made_ms", "connected": "connected_files", "operations of that": "connected_operations",
    "connected in ms": "connected_ms", "first sum ms": "used_ms", "operations for others": "other_operations",
    "for others ms": "other_ms",
}  # fmt: skip
"""Columns for one group, on the rank with the most: after making it, added by connecting it, and for a `new_group` of others."""
ALONE = {
    "ranks": "ranks", "threads": "threads", "files": "files", "store operations": "operations", "made in ms": "made_ms",
    "MiB": "mib",
}  # fmt: skip
"""Columns for a group of all ranks that a single process makes."""
RECKONED = {
    "mode": "mode", "ranks": "ranks", "groups": "groups", "threads": "threads", "files": "files",
    "store operations": "operations", "of all ranks": "all_operations", "made: files": "made_files",
    "operations": "made_operations", "at once: files": "old_files", "operations ": "old_operations",
    "of all ranks ": "old_all_operations",
}  # fmt: skip
"""Columns for the rank with the most: all groups connected, groups made only, and all pairs connected at once."""
SERVED = {
    "mode": "mode", "ranks": "ranks", "operations a second": "rate", "at once: minutes": "old_minutes", "now": "minutes",
    "now, with NCCL": "nccl_minutes",
}  # fmt: skip
"""How long one store serves the operations of all ranks, by its rate; with NCCL gloo connects only the world's group at first."""
KINDS = {"old_minutes": "old_all", "minutes": "all", "nccl_minutes": "nccl"}
CLIENTS, ASKED_S = 4, 2.0
SETTLE_S = 0.2
OPERATIONS = (
    "set", "get", "add", "check", "wait", "compare_set", "delete_key", "append", "multi_get", "multi_set",
    "queue_push", "queue_pop", "queue_len", "num_keys", "list_keys",
)  # fmt: skip


class CountingStore(dist.Store):
    """Counts what is asked of another store."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.asked = store, Counter[str]()


def _counted(name: str) -> Any:
    def call(self: CountingStore, *args: Any) -> Any:
        self.asked[name] += 1
        return getattr(self.store, name)(*args)

    return call


for operation in OPERATIONS:
    setattr(CountingStore, operation, _counted(operation))


class Meter:
    """Threads, files and operations that this process gained since the last look, per group."""

    def __init__(self, store: CountingStore, groups: int, meet: Callable[[], object] = lambda: None):
        self.store, self.groups, self.meet = store, groups, meet
        self.last, self.since = self._held(), time.perf_counter()

    def look(self) -> dict[str, float]:
        took_ms = 1e3 * (time.perf_counter() - self.since)
        before, self.last = self.last, self._held()
        more = {name: (self.last[name] - before[name]) / self.groups for name in before}
        self.since = time.perf_counter()
        return more | {"ms": took_ms / self.groups}

    def _held(self) -> dict[str, int]:
        """Count while all ranks wait, because a connection of another rank is a file of this one, too."""
        self.meet()
        time.sleep(SETTLE_S)
        tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        asked = self.store.asked.total()
        self.meet()
        return {"threads": tasks, "files": files, "operations": asked}


def measure(rank: int, size: int, groups: int, path: str) -> dict[str, float]:
    """Figures of MEASURED on one rank of `size`, which meet at the file `path`."""
    store = CountingStore(dist.FileStore(path, size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    connect_pairs(the_world())
    meter = Meter(store, groups, dist.barrier)
    made = [new_group(list(range(size)), "all") for _ in range(groups)]
    once_made = meter.look()
    for group in made:
        connect_pairs(group)
    connected = meter.look()
    for group in made:
        dist.all_reduce(torch.zeros(1), group=group)
    used = meter.look()
    assert not used["files"] and not used["operations"], "connect_pairs connects whatever a sum sends between"
    for _ in range(groups):
        dist.new_group([(rank + 1) % size])
    others = meter.look()
    dist.destroy_process_group()
    return {
        "ranks": size, **once_made, "made_ms": once_made["ms"], "connected_files": connected["files"],
        "connected_operations": connected["operations"], "connected_ms": connected["ms"], "used_ms": used["ms"],
        "other_operations": others["operations"], "other_ms": others["ms"],
    }  # fmt: skip


def _rank(rank: int, size: int, groups: int, path: str, answers: Any) -> None:
    answers.put(measure(rank, size, groups, path))


@contextmanager
def connecting(how: str) -> Iterator[None]:
    """torch's setting, for this process and those that it starts."""
    before = os.environ.get(CONNECT_LATE)
    os.environ[CONNECT_LATE] = str(int(how == LATE))
    try:
        yield
    finally:
        del os.environ[CONNECT_LATE]
        if before is not None:
            os.environ[CONNECT_LATE] = before


def measured(size: int, groups: int, how: str = LATE) -> dict[str, Any]:
    """Figures of MEASURED, of that rank of `size` new processes which has most of each."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder, connecting(how):
        path = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(rank, size, groups, path, answers)) for rank in range(size)]
        for process in ranks:
            process.start()
        found = [answers.get(timeout=300) for _ in ranks]
        for process in ranks:
            process.join()
    return {"how": how, **{name: max(each[name] for each in found) for name in found[0]}}


def alone(size: int, groups: int) -> dict[str, float]:
    """Figures of ALONE: the last rank of `size` makes groups of all ranks, and no other rank is there."""
    store, process = CountingStore(dist.HashStore()), psutil.Process()
    with connecting(LATE):
        dist.init_process_group("gloo", store=store, rank=size - 1, world_size=size, timeout=timedelta(seconds=60))
        meter, before = Meter(store, groups), process.memory_info().rss
        made = [new_group(range(size), "all") for _ in range(groups)]
        found, mib = meter.look(), (process.memory_info().rss - before) / groups / 2**20
    del made
    dist.destroy_process_group()
    return {"ranks": size, **found, "made_ms": found["ms"], "mib": mib}


def served() -> float:
    """Operations a second that one store of this machine answers."""
    context = multiprocessing.get_context("spawn")
    answers, begin = context.Queue(), context.Barrier(CLIENTS)
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    clients = [context.Process(target=_ask, args=(store.port, begin, answers)) for _ in range(CLIENTS)]
    for process in clients:
        process.start()
    asked = sum(answers.get(timeout=120) for _ in clients)
    for process in clients:
        process.join()
    return float(asked / ASKED_S)


def _ask(port: int, begin: Any, answers: Any) -> None:
    store, asked = dist.TCPStore("localhost", port, None, False, wait_for_workers=False), 0
    store.set("address", "127.0.0.1:12345")
    begin.wait()
    until = time.monotonic() + ASKED_S
    while time.monotonic() < until:
        store.get("address")
        asked += 1
    answers.put(asked)


def peers(size: int) -> int:
    """Ranks of a group that each rank is connected with: those whose numbers differ from its own by a power of 2, in a ring."""
    steps = [1 << power for power in range((size - 1).bit_length())]
    return len({step % size for step in steps} | {-step % size for step in steps})


Line = Callable[[str, int], float]


def reckoned(late: Line, at_once: Line, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of RECKONED.  `late`: (kind, peers) -> of a group; `at_once`: (kind, ranks) -> of a group."""
    for mode in ("disaggregated", "colocated"):
        for number in ranks:
            cluster = Cluster() if number >= 128 else Cluster(tp=2, pp=2)
            config = cluster.config(mode, number, 64)
            own = _groups_by_rank(config)
            made, connected, before = (
                {kind: [sum(of(kind, each) for each in groups) for groups in own] for kind in ("files", "operations")}
                for of in (
                    lambda kind, each: late(kind, 0),
                    lambda kind, each: late(kind, each[1]),
                    lambda kind, each: at_once(kind, each[0]),
                )
            )
            groups = max(map(len, own))
            yield {
                "mode": mode, "ranks": number, "groups": groups, "threads": round(groups * late("threads", 0)),
                **{kind: round(max(values)) for kind, values in connected.items()},
                **{f"made_{kind}": round(max(values)) for kind, values in made.items()},
                **{f"old_{kind}": round(max(values)) for kind, values in before.items()},
                "all_operations": round(sum(connected["operations"])),
                "nccl_operations": round(
                    sum(made["operations"]) + number * (late("operations", peers(number)) - late("operations", 0))
                ),
                "old_all_operations": round(sum(before["operations"])),
            }  # fmt: skip


def _groups_by_rank(config: TrainConfig) -> list[list[tuple[int, int]]]:
    """By rank (ranks, peers) of each of its groups, the world's among them; peers in a link's group are ends of its links."""
    placements, own = role_placements(config), defaultdict[int, list[tuple[int, int]]](list)
    ends = {GroupName(lane.label, lane.ranks): lane.links for lane in lanes_of(Site(placements))}
    everyone = GroupName("world", tuple(range(world_size(config))))
    for group in [everyone, *run_groups(placements, training_placements(config))]:
        links, around = ends.get(group), peers(len(group.ranks))
        for rank in group.ranks:
            met = around if links is None else len({link[:2] for link in links if rank in link[:2]})
            own[rank].append((len(group.ranks), met))
    return [own[rank] for rank in sorted(own)]


def line(rows: Sequence[dict[str, Any]], by: Callable[[dict[str, Any]], int]) -> Line:
    """Through the figures of the smallest and the largest group, once connected, along `by` of a group."""
    small, large = rows[0], rows[-1]

    def of(kind: str, x: int) -> float:
        first, last = (row[kind] + row.get(f"connected_{kind}", 0.0) for row in (small, large))
        each = (last - first) / (by(large) - by(small))
        return float(first + each * (x - by(small)))

    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sizes of groups; ascending")
    parser.add_argument("--groups", type=int, default=20, metavar="N", help="groups of each size")
    parser.add_argument("--alone", type=int, nargs="*", default=[1024, 4096, 16384], metavar="N")
    parser.add_argument("--runs", type=int, nargs="+", default=[8, 128, 1024, 4096, 16384], metavar="N")
    args = parser.parse_args()
    late, at_once = ([measured(size, args.groups, how) for size in args.ranks] for how in (LATE, AT_ONCE))
    print(format_table(MEASURED, [*late, *at_once]))
    print("\n" + format_table(ALONE, [alone(size, 4) for size in args.alone]))
    lines = line(late, lambda row: peers(row["ranks"])), line(at_once, lambda row: row["ranks"])
    runs, rate = list(reckoned(*lines, args.runs)), served()
    print("\n" + format_table(RECKONED, runs))
    print("\n" + format_table(SERVED, [_served(row, rate) for row in runs]))


def _served(row: dict[str, Any], rate: float) -> dict[str, Any]:
    minutes = {name: row[f"{kind}_operations"] / rate / 60 for name, kind in KINDS.items()}
    return {"mode": row["mode"], "ranks": row["ranks"], "rate": rate, **minutes}


if __name__ == "__main__":
    main()
