"""Executes one rank's actions; on a GPU each worker has its own stream."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.clock import SteadyClock
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.process_groups import is_lost_peer, new_group, stalled
from oppo_megatron.errors import StallError
from oppo_megatron.mcore.device import new_stream
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.links import Link, in_waves, lanes_of, link_of
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class Links:
    groups: dict[Link, dist.ProcessGroup]

    def of(self, action: Action) -> dist.ProcessGroup:
        return self.groups[link_of(action)]

    def use_once(self, device: torch.device) -> None:
        """Send a number over each link: NCCL's first message blocks."""
        rank = dist.get_rank()
        for (source, destination, *_), group in self.groups.items():
            number = torch.zeros(1, device=device)
            work = dist.isend(number, destination, group) if rank == source else dist.irecv(number, source, group)
            assert work is not None, "this rank is an end of each of its links"
            work.wait()


def build_links(site: Site) -> Links:
    rank, groups = dist.get_rank(), dict[Link, dist.ProcessGroup]()
    lanes = list(lanes_of(site))
    for lane in lanes:
        group = new_group(lane.ranks, lane.label)
        groups |= {link: group for link in lane.links if rank in link[:2]}
    waves = in_waves([link for lane in lanes for link in lane.links])
    return Links({link: groups[link] for wave in waves for link in wave if link in groups})


class RoleWorker(Protocol):
    def live(self, action: Action) -> bool:
        """False if the action's sequences have ended."""

    def compute(self, action: Action) -> int:
        """Return the number of tokens (rows).  Raises CapacityError."""

    def outbox(self, action: Action) -> Sequence[Tensor]:
        """Tensors to send."""

    def inbox(self, action: Action) -> Iterator[Tensor]:
        """Yield buffers to receive into; each is filled before the next is requested."""


@dataclass(frozen=True, slots=True)
class _Shifted:
    action: Action
    shift: int

    def __str__(self) -> str:
        return str(replace(self.action, chunk=self.action.chunk + self.shift))


ROUNDS_IN_FLIGHT = 64  # rounds after which a rank waits for its sends
ROUNDS_OF_AN_UPDATE = 8192  # the same if some ranks only train, and receive nothing meanwhile

Observer = Callable[[Action, float, float, int], None]
"""Called after every action: start, end, number of tokens (0 for messages)."""


@dataclass
class Executor:
    """`timeout_s` limits each message; after `rounds_in_flight` rounds a rank waits for its sends."""

    rank: int
    workers: Mapping[str, RoleWorker]
    links: Links
    timeout_s: float
    device: torch.device
    observe: Observer
    activity: Activity = field(default_factory=Activity)
    clock: Callable[[], float] = field(default_factory=SteadyClock)
    rounds_in_flight: int = ROUNDS_IN_FLIGHT
    # By round: its shift, and what it sent.
    _sent: deque[tuple[int, list[tuple[Action, Any, Tensor]]]] = field(default_factory=deque)
    _num_rounds: int = 0

    def __post_init__(self) -> None:
        roles = self.workers if self.device.type == "cuda" else ()
        self._streams = {role: new_stream(self.device, first=role == "actor") for role in roles}

    def run(self, actions: Sequence[Action], shift: int = 0) -> None:
        """Do a round's actions.  Raises StallError naming the action (chunk + `shift`)."""
        self._num_rounds += 1
        self._sent.append((shift, []))
        for stream in self._streams.values():
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.activity.doing(f"round {shift + 1}"):
            for role, of_role in groupby(actions, attrgetter("role")):  # grouped, because entering a stream is slow
                with torch.cuda.stream(self._streams[role]) if self._streams else contextlib.nullcontext():
                    for action in of_role:
                        if self.workers[role].live(action):
                            self._do(action, self.workers[role], shift)
        for stream in self._streams.values():
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._release(self.rounds_in_flight)

    def _do(self, action: Action, worker: RoleWorker, shift: int) -> None:
        self.activity.now_at(_Shifted(action, shift), action.op is Op.RECV)
        start, size = self.clock(), 0
        if action.op is Op.SEND:
            self._send(action, worker)
        elif action.op is Op.RECV:
            self._receive(action, worker)
        else:
            size = self._compute(action, worker)
        self.observe(action, start, self.clock(), size)

    def finish_sends(self) -> None:
        self._release(0)

    def _release(self, rounds: int) -> None:
        while len(self._sent) > rounds:
            shift, sends = self._sent.popleft()
            for action, work, _ in sends:
                with self.activity.doing(_Shifted(action, shift), waits=True):
                    self._wait(action, work, shift)  # gloo reports a completed send only to a wait

    def _send(self, action: Action, worker: RoleWorker) -> None:
        for tensor in worker.outbox(action):
            with self._naming(action):
                work = dist.isend(tensor, action.peer, group=self.links.of(action), tag=self._tag(action))
            self._sent[-1][1].append((action, work, tensor))

    def _receive(self, action: Action, worker: RoleWorker) -> None:
        for buffer in worker.inbox(action):
            with self._naming(action):
                work = dist.irecv(buffer, action.peer, group=self.links.of(action), tag=self._tag(action))
            self._wait(action, work)

    def _tag(self, action: Action) -> int:
        """Return a tag per round, step and micro-batch, so that gloo never delivers a message in place of a lost one."""
        step = 0 if action.step is None else action.step + 1
        return ((self._num_rounds << 18) + (step << 6) + action.micro_batch) % 2**31

    def _compute(self, action: Action, worker: RoleWorker) -> int:
        try:
            return worker.compute(action)
        except RuntimeError as error:
            if is_lost_peer(error):
                raise self._stalled(action, error) from error
            raise

    def _wait(self, action: Action, work: Any, shift: int | None = None) -> None:
        with self._naming(action, shift):
            if self.device.type == "cuda":
                work.wait()  # the stream waits; given a time, NCCL has the host wait as well.  The group has its own time limit
            else:
                work.wait(timedelta(seconds=self.timeout_s))

    @contextlib.contextmanager
    def _naming(self, action: Action, shift: int | None = None) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._stalled(action, error, shift, time.monotonic() - start) from error

    def _stalled(self, action: Action, error: RuntimeError, shift: int | None = None, seconds: float | None = None) -> StallError:
        shift = self._sent[-1][0] if shift is None else shift
        return stalled(self.rank, str(_Shifted(action, shift)), error, self.timeout_s, seconds)
