"""`benchmarks/groups.py`: what a group of gloo takes, as docs/scale.md says, and what the groups of a run take by that."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from benchmarks.groups import AT_ONCE, LATE, alone, measured, peers
from tests.support.ranks import PRELOADED, run_ranks


@pytest.mark.parametrize(
    ("how", "files", "operations"), [(LATE, (4, 1), (1, 2)), pytest.param(AT_ONCE, (5, 0), (5, 0), marks=pytest.mark.long)]
)
def test_threads_files_and_store_operations_of_a_group(how: str, files: tuple[int, int], operations: tuple[int, int]) -> None:
    """3 threads; 4 files and an operation, and one and two for each connection; by itself torch takes n + 3 and 2 n + 1."""
    found = measured(2, 4, how)
    assert found["threads"] == 3
    assert (found["files"], found["connected_files"]) == files
    assert (found["operations"], found["connected_operations"]) == operations
    assert found["other_operations"] == 0 and found["made_ms"] > 0 and found["used_ms"] > 0


SIZES = [2, 1024, 4096]


def tell_alone(answers: Connection) -> None:
    answers.send({size: (alone(size, 2), dist.is_initialized()) for size in SIZES})


@pytest.fixture(scope="module")
def by_size() -> dict[int, tuple[dict[str, float], bool]]:
    """Counts by size, in a process that has no threads of other tests, which may end while they are counted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell_alone, args=(theirs,))
    process.start()
    theirs.close()
    answer: dict[int, tuple[dict[str, float], bool]] = ours.recv()
    process.join()
    return answer


@pytest.mark.parametrize("size", SIZES)
def test_a_group_takes_as_much_to_make_however_many_ranks_it_has(
    by_size: dict[int, tuple[dict[str, float], bool]], size: int
) -> None:
    found, initialized = by_size[size]
    assert (found["threads"], found["files"], found["operations"]) == (3, 4, 1)
    assert not initialized


def test_no_collective_of_a_run_connects_more_ranks_than_its_start_does() -> None:
    """Pairs in gloo's ring and trees are all those of its barrier."""
    sizes = [2, 3, 5, 6, 7, 8]
    found = run_ranks(8, "tests.gloo.jobs_groups:connections", sizes=sizes)
    assert found == [[(4, peers(size), 0) if rank < size else (0, 0, 0) for size in sizes] for rank in range(8)]
