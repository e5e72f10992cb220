"""Ranks meet in a store at MASTER_ADDR:MASTER_PORT, or report within a deadline which are missing.

The last rank, or the first with a fault or at the deadline, writes the `outcome` ("" or a fault), which ends every wait.
Counters: `arrived` ranks, `entered` processes, `read` readers of the outcome.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.config.model import format_ranks
from oppo_megatron.errors import WorldError

POLL_S = 0.1
POLLS_PER_S = 10_000  # of all ranks together: the store also serves registrations
OWN_KNOCK_S = 2.0  # how long the owner of the store tries its own address, which only helps to choose a network
LINGER_S = 5.0  # how long the owner of the store stays for those that have not yet read the outcome
LOOPBACK = "127.0.0.1"
BACKEND = "oppo-loopback"  # the name of the rendezvous
BACKLOG = 1024  # ranks that knock at once
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Meeting:
    store: dist.Store
    hosts: tuple[RankHost, ...]  # on rank 0 alone, which broadcasts them: n ranks reading n entries would overload the store
    local_address: str | None  # this rank's, on the network of the meeting point


@dataclass(frozen=True)
class MeetingPoint:
    address: str
    port: int
    size: int
    name: str
    opens: bool  # this rank opens it; else `opener` does
    opener: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], rank: int, size: int) -> MeetingPoint:
        """MASTER_ADDR, MASTER_PORT and the launcher's name of the run."""
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run = environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID", "run")
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_STEP_ID", "0")
        return cls(
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            size=size,
            name=f"oppo/{run}/{attempt}",
            opens=rank == 0 and not agent,
            opener="the torchrun agent of node 0" if agent else "rank 0",
        )

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def meet(me: RankHost, point: MeetingPoint, timeout_s: float) -> Meeting:
    """Wait for all ranks. Raises WorldError within `timeout_s`."""
    return _Arrival(me, point, timeout_s).meet()


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Return `work()` or raise TimeoutError; torch's calls may exceed their timeout."""
    done: list[ResultT] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised below, in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]


class _Arrival:
    def __init__(self, me: RankHost, point: MeetingPoint, timeout_s: float):
        self.me, self.point, self.timeout_s = me, point, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.refusal = ""  # why the meeting point's address did not answer

    def meet(self) -> Meeting:
        if self.point.opens:
            server, local_address = self._open(), self._knock(OWN_KNOCK_S)
        else:
            server, local_address = None, self._find()
        store = dist.PrefixStore(self.point.name, server or self._connect())
        try:
            fault = self._register(store) or self._outcome(store)
            store.add("read", 1)
            if fault and self.point.opens:  # let others read the outcome: the store ends with this process
                until = time.monotonic() + LINGER_S
                with contextlib.suppress(dist.DistError):
                    while store.add("read", 0) < store.add("entered", 0) and time.monotonic() < until:
                        time.sleep(POLL_S)
        except dist.DistError as error:
            raise WorldError(
                f"{self.me} lost the meeting point {self.point}: {self.point.opener}, which opened it, has ended; see its error"
            ) from error
        if fault:
            raise WorldError(fault)
        names = [f"rank/{rank}" for rank in range(self.point.size)]
        places = store.multi_get(names) if self.me.rank == 0 else []
        return Meeting(store, tuple(RankHost.decode(place) for place in places), local_address)

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _open(self) -> dist.TCPStore:
        point = self.point
        timeout = timedelta(seconds=self.timeout_s)
        try:
            if is_loopback(point.address):
                return loopback_store(point.port, timeout)
            # Without address: the store's own connection to it must not depend on MASTER_ADDR being right.
            return dist.TCPStore("localhost", point.port, None, True, timeout, wait_for_workers=False)
        except (dist.DistError, OSError) as error:
            raise WorldError(
                f"{self.me} cannot open the meeting point at port {point.port}: {_reason(error)}; "
                "give all ranks a MASTER_PORT that is free on this host"
            ) from error

    def _knock(self, seconds: float) -> str | None:
        """This end's address, or None and `refusal`."""
        try:
            with socket.create_connection((self.point.address, self.point.port), timeout=seconds) as connection:
                self.refusal = ""
                return str(connection.getsockname()[0])
        except OSError as error:
            self.refusal = error.strerror or str(error)
            return None

    def _find(self) -> str:
        while (left_s := self._left_s()) > 0:
            address = self._knock(left_s)
            if address is not None:
                return address
            time.sleep(min(POLL_S, left_s))
        raise WorldError(
            f"{self.me} found no meeting point of the {self.point.size} ranks at {self.point} within "
            f"{self.timeout_s:g} s ({self.refusal}); {self.point.opener} opens it. Check that it was started, that MASTER_ADDR "
            "and MASTER_PORT are the same for all ranks and name its host, and that no firewall is between"
        )

    def _connect(self) -> dist.TCPStore:
        timeout = timedelta(seconds=max(POLL_S, self._left_s()))
        address, port = self.point.address, self.point.port
        try:
            return within(self._left_s(), lambda: dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False))
        except (dist.DistError, TimeoutError) as error:
            raise WorldError(
                f"{self.me} was answered at {self.point}, but not by the meeting point of a run: another program has "
                f"that port. {self.point.opener} did not open it; give all ranks another MASTER_PORT"
            ) from error

    def _register(self, store: dist.Store) -> str | None:
        """Return a fault if refused."""
        me, size, fault = self.me, str(self.point.size), None
        store.add("entered", 1)
        expected = store.compare_set("size", "", size).decode()
        if expected != size:
            fault = f"{me} was started as one of {size} ranks, an earlier one as one of {expected}; start all with one number"
        elif store.add(f"count/{me.rank}", 1) > 1:
            first = RankHost.decode(store.get(f"rank/{me.rank}"))
            fault = (
                f"rank {me.rank} came twice to {self.point}: from host {first.host} (process {first.pid}) and from "
                f"host {me.host} (process {me.pid}); give each process a RANK of its own, and each run a MASTER_PORT"
            )
        if fault is None:
            store.set(f"rank/{me.rank}", me.encode())
        if (fault is not None or store.add("arrived", 1) == self.point.size) and self._decides(store):
            store.set("outcome", fault or "")
        return fault

    def _decides(self, store: dist.Store) -> bool:
        return store.add("decided", 1) == 1

    def _outcome(self, store: dist.Store) -> str:
        while not store.check(["outcome"]):
            if self._left_s() <= 0 and self._decides(store):
                store.set("outcome", self._absence(store))
            time.sleep(max(POLL_S, self.point.size / POLLS_PER_S))
        return store.get("outcome").decode()

    def _absence(self, store: dist.Store) -> str:
        missing = [rank for rank in range(self.point.size) if not store.check([f"rank/{rank}"])]
        astray = f" MASTER_ADDR does not lead to this host from here ({self.refusal})." if self.refusal else ""
        came = self.point.size - len(missing)
        plural = "s" if len(missing) > 1 else ""
        return (
            f"{self.me} waited {self.timeout_s:g} s at {self.point}, and {came} of {self.point.size} ranks came: "
            f"rank{plural} {format_ranks(missing)} missing.{astray} Check that every machine was started with the same "
            "MASTER_ADDR and MASTER_PORT, and read the missing ranks' logs. If they are only slow, raise runtime.timeout_s: "
            "ranks have one sixth of it, at least 60 s, to meet"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).rpartition("message: ")[2].strip() or type(error).__name__


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_store(port: int, timeout: timedelta) -> dist.TCPStore:
    """Open a store on the loopback alone; port 0: any. Raises OSError."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    except OSError:
        listener.close()
        raise
    return dist.TCPStore(
        LOOPBACK, port, None, True, timeout, wait_for_workers=False, multi_tenant=False, master_listen_fd=descriptor
    )


AGENT_TIMEOUT = timedelta(minutes=10)  # of the agent's messages; the ranks have their own deadlines


class LoopbackRendezvous(StaticTCPRendezvous):
    def __init__(self, run_id: str, store: dist.TCPStore, timeout: timedelta):
        super().__init__(LOOPBACK, store.port, 0, 1, run_id, int(timeout.total_seconds()))
        self._store = store

    def get_backend(self) -> str:
        return BACKEND


class LocalMeeting:
    def __init__(self, run_id: str):
        self.run_id, self.store = run_id, loopback_store(0, AGENT_TIMEOUT)

    def settings(self) -> dict[str, Any]:
        """Arguments of torch's LaunchConfig; its agent opens no port."""
        rendezvous_handler_registry.register(BACKEND, _handler)  # torch refuses another function later
        return {"run_id": self.run_id, "rdzv_backend": BACKEND, "rdzv_configs": {"store": self.store}}

    def point(self, num_ranks: int) -> MeetingPoint:
        opener, name = "the process that started the ranks", f"oppo/{self.run_id}/0"
        return MeetingPoint(LOOPBACK, self.store.port, num_ranks, name, opens=False, opener=opener)


def _handler(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(parameters.run_id, parameters.config["store"], AGENT_TIMEOUT)
