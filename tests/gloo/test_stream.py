"""The token stream over real ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.engine.executor import Executor, RoleWorker, build_links
from oppo_megatron.engine.stream import ChunkEncoder, ChunkOutlet, ListenWorker, share
from oppo_megatron.errors import StreamError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
SEQ_ID = 31


def rollout(prompt: tuple[int, ...] = (1, 2)) -> Rollout:
    return Rollout(Prompt(SEQ_ID, 0, "", prompt), 0)


def chunks(number: int) -> list[Chunk]:
    made, offset = [], 0
    for index in range(number):
        rows = []
        if index % 2 == 0:
            tokens = [10 * index + t for t in range(3)]
            rows = [ChunkRow(SEQ_ID, offset, tokens, [-0.1 * (t + 1) for t in tokens], [-0.2] * 3, index)]
            offset += 3
        made.append(Chunk(index, 5 * index, rows))
    return made


@dataclass
class Sender:
    messages: Iterator[Sequence[Tensor]]

    def __post_init__(self) -> None:
        self.now: Sequence[Tensor] = ()

    def turn(self) -> None:
        self.now = next(self.messages)

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        raise AssertionError(f"{action}: nothing is computed here")

    def outbox(self, action: Action) -> Sequence[Tensor]:
        return self.now

    def inbox(self, action: Action) -> Iterator[Tensor]:
        raise AssertionError(f"{action}: nothing comes here")


class Stream:
    def __init__(self, worker: RoleWorker):
        world = dist.get_world_size()
        site = Site({"actor": RolePlacement((0,)), "reward": RolePlacement(tuple(range(1, world)), dp=world - 1)})
        self.schedule = add_communication(Schedule({}), Round(1, steps=1), site)
        self.executor = Executor(dist.get_rank(), {"actor": worker}, build_links(site), 60.0, CPU, lambda *_: None)

    def round(self) -> None:
        self.executor.run(self.schedule.of(self.executor.rank))


def whole(number: int, fan_out: int) -> dict[str, Any]:
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", fan_out):
        return _whole(number)


def _whole(number: int) -> dict[str, Any]:
    got = _send(number) if dist.get_rank() == 0 else _listen(number)
    last = dist.get_world_size() - 1
    values = torch.tensor([0.5, -3.0]) if dist.get_rank() == last else None
    return {"got": got, "shared": share(values, 2, last, CPU).tolist()}


def _send(number: int) -> list[Chunk]:
    outlet = ChunkOutlet(CPU)
    outlet.admit([rollout()])
    sender = Sender(outlet.message(chunk) for chunk in chunks(number))
    stream = Stream(sender)
    for _ in range(number):
        sender.turn()
        stream.round()
    stream.executor.drain()
    outlet.retire([rollout()])
    return []


def _listen(number: int) -> list[Chunk]:
    worker = ListenWorker(CPU)
    worker.admit([rollout()])
    stream, got = Stream(worker), []
    for _ in range(number):
        stream.round()
        got.append(worker.end())
    stream.executor.drain()
    worker.retire([rollout()])
    return got


def damaged(kind: str) -> str:
    if dist.get_rank() == 0:
        stream, error = _send_damaged(kind), ""
    else:
        stream, error = _listen_to_damaged()
    dist.barrier()  # the sender's buffers live until here; what comes behind a refused header is never taken
    del stream
    return error


def _listen_to_damaged() -> tuple[Stream, str]:
    worker = ListenWorker(CPU)
    worker.admit([rollout()])
    stream = Stream(worker)
    try:
        for _ in range(3):
            stream.round()
    except StreamError as error:
        return stream, str(error)
    return stream, "no error"


def _send_damaged(kind: str) -> Stream:
    encoder = ChunkEncoder()
    encoder.open(SEQ_ID, (1, 3) if kind == "prompt" else (1, 2))
    messages = [list(map(torch.from_numpy, encoder.encode(chunk))) for chunk in chunks(3)]
    if kind == "lost":
        messages = [messages[0], messages[2]]
    elif kind == "repeated":
        messages = [messages[0], messages[0]]
    elif kind == "corrupted":
        messages[2][1][8] ^= 4  # a token of the third message
    elif kind == "prompt":
        messages = messages[:1]
    sender = Sender([part for part in message if len(part)] for message in messages)
    stream = Stream(sender)
    for _ in messages:
        sender.turn()
        stream.round()
    return stream


@pytest.mark.parametrize(("world", "fan_out"), [(2, 8), (4, 8), (4, 1), (5, 2)])
def test_every_scorer_rank_receives_what_was_sent(world: int, fan_out: int) -> None:
    """Senders are the actor, or one of their own that passes it on."""
    answers = run_ranks(world, "tests.gloo.test_stream:whole", number=6, fan_out=fan_out)
    assert answers[0]["got"] == []
    for answer in answers[1:]:
        assert answer["got"] == chunks(6)
    assert all(answer["shared"] == [0.5, -3.0] for answer in answers)


@pytest.mark.parametrize(
    "kind,where",
    [
        ("lost", f"message 2 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
        ("repeated", f"message 0 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
        ("corrupted", f"sequence {SEQ_ID}, offset 3 .*corrupted"),
        ("prompt", f"sequence {SEQ_ID}, offset 0 .*different prompts"),
    ],
)
def test_a_damaged_stream_is_an_error_on_every_scorer_rank(kind: str, where: str) -> None:
    for message in run_ranks(3, "tests.gloo.test_stream:damaged", kind=kind)[1:]:
        assert re.search(where, message), message
