"""Schedules carried out by workers without models: what they send says what it is, and what they receive is compared."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.engine.executor import Executor, build_links
from oppo_megatron.errors import StallError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Site

CPU = torch.device("cpu")
KILLED = 9


@dataclass
class Parrot:
    """A role on this rank; `team`: its stage's tensor ranks, `everyone`: the role's; it dies in action `last_words`."""

    team: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    random: random.Random
    last_words: str | None = None

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        time.sleep(self.random.random() * 1e-3)
        if str(action) == self.last_words:
            os._exit(KILLED)
        group = self.everyone if action.op is Op.GATHER else self.team
        assert group is not None
        if group.size() > 1:
            words = [torch.zeros(5) for _ in range(group.size())]
            dist.all_gather(words, _words(action), group=group)
            assert all(torch.equal(word, _words(action)) for word in words), (str(action), words)
        return 1

    def outbox(self, action: Action) -> Sequence[Tensor]:
        parts = 2 if action.payload is Payload.CHUNK else 1
        return [_words(action) + part for part in range(parts)]

    def inbox(self, action: Action) -> Iterator[Tensor]:
        for part in range(2 if action.payload is Payload.CHUNK else 1):
            buffer = torch.zeros(5)
            yield buffer
            assert torch.equal(buffer, _words(action) + part), (str(action), buffer)


def _words(action: Action) -> Tensor:
    """The subject of an action, alike at both ends of a message and on all ranks of a stage."""
    kind = 0 if action.payload is not None else list(Op).index(action.op)
    step = -1 if action.step is None else action.step
    role = sum(map(ord, action.role))
    return torch.tensor([kind, role, action.micro_batch, action.chunk, step], dtype=torch.float32)


@dataclass
class Outcome:
    done: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


def carry_out(
    placements: dict[str, RolePlacement],
    schedules: Sequence[Schedule],
    late_s: float,
    last_words: tuple[int, str] | None = None,
    rounds: int = 1,
) -> list[Outcome]:
    """Run each schedule `rounds` times over links of its own, whose messages may be `late_s` late."""
    return [_carry_out(Site(placements), schedule, late_s, last_words, rounds) for schedule in schedules]


def _carry_out(site: Site, schedule: Schedule, late_s: float, last_words: tuple[int, str] | None, rounds: int) -> Outcome:
    rank, outcome = dist.get_rank(), Outcome()
    links = build_links(site)
    links.use_once(CPU)
    workers = {role: _worker(placement, rank, late_s) for role, placement in site.placements.items()}
    if last_words is not None and last_words[0] == rank:
        for worker in workers.values():
            worker.last_words = last_words[1]

    def observe(action: Action, start: float, end: float, size: int) -> None:
        assert action.rank == rank and start <= end
        assert size == (0 if action.op in (Op.SEND, Op.RECV) else 1)
        outcome.done.append(str(action))

    executor = Executor(rank, workers, links, late_s, CPU, observe)
    start = time.monotonic()
    try:
        for _ in range(rounds):
            executor.run(schedule.of(rank))
        executor.drain()
    except StallError as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - start
    return outcome


def _worker(placement: RolePlacement, rank: int, late_s: float) -> Parrot:
    timeout = timedelta(seconds=late_s)
    teams = [placement.stage_ranks(d, p) for d in range(placement.dp) for p in range(placement.pp)]
    groups: list[Any] = [dist.new_group(list(team), timeout=timeout) for team in [*teams, placement.ranks]]
    use_once([group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER], CPU)
    mine = next((group for group, team in zip(groups, teams, strict=False) if rank in team), None)
    return Parrot(mine, groups[-1] if rank in placement.ranks else None, random.Random(rank))
