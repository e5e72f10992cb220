"""Ranks that find each other, and ranks that do not: every one that came says so, in time.  Ranks are threads here."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.cluster.hosts import RankHost, describe_hosts, format_ranks
from oppo_megatron.cluster.rendezvous import Meeting, MeetingPoint, meet, within
from oppo_megatron.errors import WorldError
from oppo_megatron.layout.placements import parse_ranks

TIMEOUT_S = 3.0
SLACK_S = 2.0  # what a busy machine may add


def host(rank: int, name: str = "a", node: str | None = None, threads: int = 2) -> RankHost:
    return RankHost(rank, name, node, "cpu", threads, os.getpid())


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def come(rank: int, size: int, port: int, address: str = "127.0.0.1", **environment: str) -> Meeting | str:
    """One rank's outcome: the meeting, or its error's message.  Fails where the deadline is overrun."""
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    started = time.monotonic()
    try:
        return meet(host(rank), MeetingPoint.from_environment(environment, rank, size), TIMEOUT_S)
    except WorldError as error:
        return str(error)
    finally:
        assert time.monotonic() - started < TIMEOUT_S + SLACK_S


def all_come(arrivals: list[tuple[int, int]], port: int, address: str = "127.0.0.1") -> list[Meeting | str]:
    with ThreadPoolExecutor(len(arrivals)) as pool:
        return list(pool.map(lambda arrival: come(*arrival, port, address), arrivals))


def test_ranks_meet_and_know_where_each_is(port: int) -> None:
    meetings = all_come([(2, 3), (0, 3), (1, 3)], port)
    for meeting in meetings:
        assert isinstance(meeting, Meeting), meeting
        assert [place.rank for place in meeting.hosts] == [0, 1, 2]
        assert meeting.local_address == "127.0.0.1"


def test_missing_ranks_are_named_by_every_rank_that_came(port: int) -> None:
    for fault in all_come([(0, 5), (3, 5)], port):
        assert isinstance(fault, str)
        assert "waited 3 s" in fault and f"127.0.0.1:{port}" in fault
        assert "2 of 5 ranks came: ranks 1-2,4 missing" in fault and "runtime.timeout_s" in fault


def test_without_rank_0_nobody_opens_the_meeting_point(port: int) -> None:
    for rank, fault in zip((1, 2), all_come([(1, 3), (2, 3)], port), strict=True):
        assert isinstance(fault, str)
        assert f"rank {rank} on host a found no meeting point" in fault and f"127.0.0.1:{port}" in fault
        assert "Connection refused" in fault and "rank 0 opens it" in fault


def test_an_address_that_is_no_host(port: int) -> None:
    opener, other = all_come([(0, 2), (1, 2)], port, "no-such-host.invalid")
    assert isinstance(opener, str) and isinstance(other, str)
    assert "1 of 2 ranks came: rank 1 missing" in opener and "MASTER_ADDR does not lead to this host" in opener
    assert f"found no meeting point of the 2 ranks at no-such-host.invalid:{port}" in other


def test_a_rank_that_comes_twice_ends_the_wait_of_all(port: int) -> None:
    started = time.monotonic()
    faults = all_come([(0, 3), (1, 3), (1, 3)], port)
    assert time.monotonic() - started < TIMEOUT_S, "nobody waits for a rank 2 that is taken for rank 1"
    assert len(set(map(str, faults))) == 1
    assert isinstance(faults[0], str) and "rank 1 came twice" in faults[0] and f"process {os.getpid()}" in faults[0]


def test_worlds_of_different_size_do_not_mix(port: int) -> None:
    faults = all_come([(0, 2), (1, 3)], port)
    for fault in faults:
        assert isinstance(fault, str) and "one of 2" in fault and "one of 3" in fault


@pytest.fixture
def occupied() -> Iterator[int]:
    """A port where something listens that never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(8)
        yield int(other.getsockname()[1])


def test_an_occupied_port(occupied: int) -> None:
    opener, other = all_come([(0, 2), (1, 2)], occupied)
    assert isinstance(opener, str) and isinstance(other, str)
    assert "cannot open the meeting point" in opener and "address already in use" in opener
    assert "not by the meeting point of a run" in other and "MASTER_PORT" in other


def test_a_meeting_point_that_ends_while_ranks_wait(port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    faults: list[Meeting | str] = []
    waiting = threading.Thread(
        target=lambda: faults.append(come(1, 2, port, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="x"))
    )
    waiting.start()
    while not store.check(["oppo/x/0/arrived"]):
        time.sleep(0.05)
    del store
    waiting.join()
    assert isinstance(faults[0], str)
    assert "lost the meeting point" in faults[0] and "the torchrun agent of node 0" in faults[0]


def test_runs_at_one_address_are_told_apart(port: int) -> None:
    """A rank of Slurm job 8 is not taken for one of job 7."""
    outcomes: dict[str, Meeting | str] = {}
    ranks = [("7", 0), ("8", 1)]

    def one(job: str, rank: int) -> None:
        outcomes[job] = come(rank, 2, port, SLURM_JOB_ID=job)

    threads = [threading.Thread(target=one, args=rank) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 1 missing" in str(outcomes["7"])
    assert isinstance(outcomes["8"], str)


def test_within_returns_raises_and_ends() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])
    with pytest.raises(TimeoutError):
        within(0.05, lambda: time.sleep(0.5))


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_the_configuration_reads_them(ranks: set[int]) -> None:
    assert list(parse_ranks(format_ranks(ranks))) == sorted(ranks)


def test_the_map_has_a_line_a_host() -> None:
    places = [host(0, "a", "0"), host(1, "a", "0"), host(2, "b", "1"), host(3, "b", "1", threads=1), host(4, "c")]
    assert describe_hosts(places) == [
        "rank 0-1: host a (node 0, cpu, 2 threads each)",
        "rank 2: host b (node 1, cpu, 2 threads)",
        "rank 3: host b (node 1, cpu, 1 thread)",
        "rank 4: host c (cpu, 2 threads)",
    ]
