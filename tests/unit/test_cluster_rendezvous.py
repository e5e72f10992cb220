"""Ranks that find each other, and ranks that do not: every one that came says so, in time.  Ranks are threads here."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.groups import CountingStore
from oppo_megatron.cluster.hosts import RankHost, describe_hosts
from oppo_megatron.cluster.rendezvous import Meeting, MeetingPoint, loopback_store, meet, within
from oppo_megatron.errors import WorldError
from tests.support.processes import free_port, free_ports, wait_for

Outcome = Meeting | str
LOOPBACK, TIMEOUT_S = "127.0.0.1", 3.0
LONG_S = 60.0  # where ranks find each other, or a fault
SLACK_S = 20.0  # what a busy machine may add


def host(rank: int, name: str = "a", node: str | None = None, threads: int = 2) -> RankHost:
    return RankHost(rank, name, node, "cpu", threads, os.getpid())


def come(rank: int, size: int, port: int, address: str = LOOPBACK, timeout_s: float = TIMEOUT_S, **environment: str) -> Outcome:
    """One rank's outcome: the meeting, or its error's message.  Fails where the deadline is overrun."""
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    started = time.monotonic()
    try:
        return meet(host(rank), MeetingPoint.from_environment(environment, rank, size), timeout_s)
    except WorldError as error:
        return str(error)
    finally:
        assert time.monotonic() - started < timeout_s + SLACK_S


def all_come(arrivals: list[tuple[int, int]], port: int, address: str = LOOPBACK, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
    with ThreadPoolExecutor(len(arrivals)) as pool:
        return list(pool.map(lambda arrival: come(*arrival, port, address, timeout_s), arrivals))


def of_two_jobs(port: int) -> list[Outcome]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job, rank: come(rank, 2, port, SLURM_JOB_ID=job), "78", (0, 1)))


FAILING: dict[str, tuple[Callable[[int], list[Outcome]], list[tuple[str, ...]]]] = {
    "ranks are missing": (
        lambda port: all_come([(0, 5), (3, 5)], port),
        [("waited 3 s", "127.0.0.1:PORT", "2 of 5 ranks came: ranks 1-2,4 missing", "runtime.timeout_s")] * 2,
    ),
    "rank 0 is missing": (
        lambda port: all_come([(1, 3), (2, 3)], port),
        [
            (f"rank {rank} on host a found no meeting point", "127.0.0.1:PORT", "Connection refused", "rank 0 opens it")
            for rank in (1, 2)
        ],
    ),
    "the address is no host": (
        lambda port: all_come([(0, 2), (1, 2)], port, "no-such-host.invalid"),
        [
            ("1 of 2 ranks came: rank 1 missing", "MASTER_ADDR does not lead to this host"),
            ("found no meeting point of the 2 ranks at no-such-host.invalid:PORT",),
        ],
    ),
    "the port is occupied": (
        lambda port: all_come([(0, 2), (1, 2)], port),
        [("cannot open the meeting point", "address already in use"), ("not by the meeting point of a run", "MASTER_PORT")],
    ),
    "two Slurm jobs have one address": (of_two_jobs, [("rank 1 missing",), ("rank 1 on host a",)]),
}
"""Ranks that do not find each other, and the words in each one's message."""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int, list[Outcome]]]:
    ports = dict(zip(FAILING, free_ports(len(FAILING)), strict=True))
    with socket.create_server(("127.0.0.1", ports["the port is occupied"])), ThreadPoolExecutor(len(ports)) as pool:
        return dict(zip(ports, pool.map(lambda name: (ports[name], FAILING[name][0](ports[name])), ports), strict=True))


@pytest.mark.parametrize("name", FAILING)
def test_every_rank_that_came_says_what_failed(name: str, told: dict[str, tuple[int, list[Outcome]]]) -> None:
    port, outcomes = told[name]
    for outcome, words in zip(outcomes, FAILING[name][1], strict=True):
        assert isinstance(outcome, str)
        assert [word for word in words if word.replace(":PORT", f":{port}") not in outcome] == [], outcome


def test_ranks_meet_and_rank_0_knows_where_each_is() -> None:
    meetings = all_come([(2, 3), (0, 3), (1, 3)], free_port(), timeout_s=LONG_S)
    assert all(isinstance(meeting, Meeting) and meeting.local_address == "127.0.0.1" for meeting in meetings), meetings
    known = [[place.rank for place in meeting.hosts] for meeting in meetings if isinstance(meeting, Meeting)]
    assert known == [[], [0, 1, 2], []], "it tells the others, which would all read all places from one store"
    places = [host(0, "a", "0"), host(1, "a", "0"), host(2, "b", "1"), host(3, "b", "1", threads=1), host(4, "c")]
    assert describe_hosts(places) == [
        "rank 0-1: host a (node 0, cpu, 2 threads each)", "rank 2: host b (node 1, cpu, 2 threads)",
        "rank 3: host b (node 1, cpu, 1 thread)", "rank 4: host c (cpu, 2 threads)",
    ]  # fmt: skip


def test_one_rank_alone_looks_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes an operation of the store per rank; if all that wait did so, it would answer long after the deadline."""
    port = free_port()
    point = MeetingPoint.from_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, 1, 200)
    seen = dist.PrefixStore(point.name, loopback_store(port, timedelta(seconds=10)))
    seen.add("decided", 1)  # another rank looks already
    counting = CountingStore(seen)
    monkeypatch.setattr(dist, "PrefixStore", lambda *_: counting)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(meet, host(1), point, 0.2)
        wait_for(lambda: counting.asked["check"] >= 8)  # several looks after its time is over
        seen.set("outcome", "rank 3 missing")
        with pytest.raises(WorldError, match="rank 3 missing"):
            told.result(timeout=SLACK_S)
    assert 2 < counting.asked["check"] < 200, "for the outcome alone"


def test_a_rank_that_comes_twice_worlds_of_different_size_and_a_meeting_point_that_ends_while_ranks_wait() -> None:
    started = time.monotonic()
    faults = all_come([(0, 3), (1, 3), (1, 3)], free_port(), timeout_s=LONG_S)
    assert time.monotonic() - started < LONG_S, "nobody waits for a rank 2 that is taken for rank 1"
    assert len(set(map(str, faults))) == 1
    assert isinstance(faults[0], str) and "rank 1 came twice" in faults[0] and f"process {os.getpid()}" in faults[0]
    for fault in all_come([(0, 2), (1, 3)], free_port(), timeout_s=LONG_S):
        assert isinstance(fault, str) and "one of 2" in fault and "one of 3" in fault
    store = dist.TCPStore("127.0.0.1", port := free_port(), None, True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(come, 1, 2, port, timeout_s=LONG_S, **agent)
        while not store.check(["oppo/x/0/arrived"]):
            time.sleep(0.05)
        del store
        fault = waiting.result()
    assert isinstance(fault, str) and "lost the meeting point" in fault and "the torchrun agent of node 0" in fault


def test_within_returns_raises_and_ends() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])
    over = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, lambda: over.wait(60))
    over.set()
