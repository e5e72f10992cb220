"""`benchmarks/groups.py`: what a group of gloo takes, as docs/scale.md says, and what the groups of a run take by that."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from benchmarks.groups import AT_ONCE, LATE, alone, measured, peers, reckoned
from tests.support.ranks import PRELOADED, run_ranks


@pytest.mark.parametrize(
    ("how", "files", "operations"),
    [(LATE, (4, 1), (1, 2)), pytest.param(AT_ONCE, (5, 0), (5, 0), marks=pytest.mark.long)],
)
def test_threads_files_and_store_operations_of_a_group(
    how: str, files: tuple[int, int], operations: tuple[int, int]
) -> None:
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
    """Of a process that has no threads of other tests, which may end while they are counted."""
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
    """And needs none of them: this one is alone."""
    found, initialized = by_size[size]
    assert (found["threads"], found["files"], found["operations"]) == (3, 4, 1)
    assert not initialized


def test_no_collective_of_a_run_connects_more_ranks_than_its_start_does() -> None:
    """Of the ring and the trees that gloo sends along, all pairs are those of its barrier."""
    sizes = [2, 3, 5, 6, 7, 8]
    found = run_ranks(8, "tests.gloo.jobs_groups:connections", sizes=sizes)
    assert found == [[(4, peers(size), 0) if rank < size else (0, 0, 0) for size in sizes] for rank in range(8)]


def test_peers_of_a_rank() -> None:
    assert [peers(size) for size in (1, 2, 3, 4, 8, 16, 24, 16384)] == [0, 1, 2, 3, 5, 7, 8, 27]


def test_what_the_groups_of_a_run_take() -> None:
    """By hand: connected later, a group takes a thread, and a file and an operation for each connection; at once, a file for each
    of its ranks, and an operation."""
    rows = list(
        reckoned(
            lambda kind, met: 1.0 if kind == "threads" else float(met),
            lambda kind, ranks: 1.0 if kind == "operations" else float(ranks),
            [8],
        )
    )
    assert [row["mode"] for row in rows] == ["disaggregated", "colocated"]
    for row in rows:
        assert row["threads"] == row["groups"] == row["old_operations"] and row["made_files"] == 0
        assert 2 * peers(8) < row["files"] == row["operations"] < row["groups"] * peers(8)
        assert 2 * 8 < row["old_files"] < row["groups"] * 8, "the world's and the checkpoints' group have all ranks"
        assert row["all_operations"] <= 8 * row["operations"] and row["old_all_operations"] <= 8 * row["groups"]
