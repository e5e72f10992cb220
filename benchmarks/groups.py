"""What a gloo process group takes of each rank, measured; and what the groups of a large run take of theirs, reckoned by it.

    python benchmarks/groups.py --ranks 2 4 8 16 --runs 8 128 1024 4096 16384

Ranks are processes of this machine.  Each makes `--groups` groups of all ranks and sums a number over each; then it calls
`new_group` as often for groups that it does not belong to.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.bench.figures import format_table
from oppo_megatron.bench.planning import Cluster
from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.layout.placements import role_placements, training_placements, world_size
from oppo_megatron.schedule.groups import run_groups

MEASURED = {
    "ranks": "ranks", "threads": "threads", "files": "files", "store operations": "operations", "made in ms": "made_ms",
    "first sum ms": "used_ms", "operations for others": "other_operations", "for others ms": "other_ms",
}  # fmt: skip
"""Of a group, on each of its ranks; of a call of `new_group` for others."""
RECKONED = {
    "mode": "mode", "ranks": "ranks", "groups": "groups", "threads": "threads", "files": "files",
    "store operations": "operations", "of all ranks": "all_operations",
}  # fmt: skip
"""Of the rank that has most of each."""
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


def measure(rank: int, size: int, groups: int, path: str) -> dict[str, float]:
    """Figures of MEASURED on one rank of `size`, which meet at the file `path`."""
    store = CountingStore(dist.FileStore(path, size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1))
    before, started = _held(store), time.perf_counter()
    made = [new_group(list(range(size)), "all") for _ in range(groups)]
    made_s = time.perf_counter() - started
    for group in made:
        dist.all_reduce(torch.zeros(1), group=group)
    used_s, after = time.perf_counter() - started - made_s, _held(store)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(groups):
        dist.new_group([(rank + 1) % size])
    other_s, end = time.perf_counter() - started, _held(store)
    dist.barrier()
    dist.destroy_process_group()
    each = {name: (after[name] - before[name]) / groups for name in after}
    others = {
        "other_operations": (end["operations"] - after["operations"]) / groups,
        "other_ms": 1e3 * other_s / groups,
    }
    return {"ranks": size, **each, "made_ms": 1e3 * made_s / groups, "used_ms": 1e3 * used_s / groups, **others}


def _held(store: CountingStore) -> dict[str, int]:
    """What this process has so far."""
    tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return {"threads": tasks, "files": files, "operations": store.asked.total()}


def _rank(rank: int, size: int, groups: int, path: str, answers: Any) -> None:
    answers.put((rank, measure(rank, size, groups, path)))


def measured(size: int, groups: int) -> dict[str, float]:
    """Figures of MEASURED on rank 0 of `size` new processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(rank, size, groups, path, answers)) for rank in range(size)]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    return found[0]


def reckoned(of_size: Sequence[dict[str, float]], ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of RECKONED, by lines through the figures of the smallest and the largest group."""
    lines = {name: _line(of_size[0], of_size[-1], name) for name in ("threads", "files", "operations")}
    for mode in ("disaggregated", "colocated"):
        for number in ranks:
            cluster = Cluster() if number >= 128 else Cluster(tp=2, pp=2)
            config = cluster.config(mode, number, 64)
            groups = run_groups(role_placements(config), training_placements(config))
            sizes: dict[int, list[int]] = {rank: [world_size(config)] for rank in range(world_size(config))}
            for group in groups:
                for rank in group.ranks:
                    sizes[rank].append(len(group.ranks))
            takes = {
                name: [sum(fixed + each * size for size in own) for own in sizes.values()]
                for name, (fixed, each) in lines.items()
            }
            most = {name: round(max(values)) for name, values in takes.items()}
            yield {
                "mode": mode, "ranks": number, "groups": max(map(len, sizes.values())), **most,
                "all_operations": round(sum(takes["operations"])),
            }  # fmt: skip


def _line(small: dict[str, float], large: dict[str, float], name: str) -> tuple[float, float]:
    """(of any group, for each of its ranks)"""
    each = (large[name] - small[name]) / (large["ranks"] - small["ranks"])
    return small[name] - each * small["ranks"], each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sizes of groups; ascending"
    )
    parser.add_argument("--groups", type=int, default=20, metavar="N", help="groups of each size")
    parser.add_argument("--runs", type=int, nargs="+", default=[8, 128, 1024, 4096, 16384], metavar="N")
    args = parser.parse_args()
    rows = [measured(size, args.groups) for size in args.ranks]
    print(format_table(MEASURED, rows))
    print("\n" + format_table(RECKONED, list(reckoned(rows, args.runs))))


if __name__ == "__main__":
    main()
