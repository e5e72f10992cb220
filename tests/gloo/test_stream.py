"""The token stream over real ranks, rows and figures that ranks tell each other, and what a group of gloo takes."""

import json
import math
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.groups import AT_ONCE, LATE, measured, peers
from oppo_megatron.chunks import Chunk, ChunkRow, ChunkRows
from oppo_megatron.cluster.process_groups import connect_pairs, gather_figures, new_group
from oppo_megatron.engine.executor import Executor, RoleWorker, build_links
from oppo_megatron.engine.stream import ChunkEncoder, ChunkOutlet, ListenWorker, gather_rows, share
from oppo_megatron.errors import StreamError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import add_communication
from tests.support.ranks import run_ranks
from tests.support.traffic import Traffic

JOBS = "tests.gloo.test_stream:"
CPU = torch.device("cpu")
SEQ_ID = 31


def rollout() -> Rollout:
    return Rollout(Prompt(SEQ_ID, 0, "", (1, 2)), 0)


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
    stream.executor.finish_sends()
    outlet.retire([rollout()])
    return []


def _listen(number: int) -> list[Chunk]:
    worker = ListenWorker(CPU)
    worker.admit([rollout()])
    stream, got = Stream(worker), []
    for _ in range(number):
        stream.round()
        got.append(worker.end())
    stream.executor.finish_sends()
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
    answers = run_ranks(world, f"{JOBS}whole", number=6, fan_out=fan_out)
    assert answers[0]["got"] == []
    for answer in answers[1:]:
        assert answer["got"] == chunks(6)
    assert all(answer["shared"] == [0.5, -3.0] for answer in answers)


@pytest.mark.parametrize("kind,where", [
    ("lost", f"message 2 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
    ("repeated", f"message 0 came, but 1 was due; .* sequence {SEQ_ID} at offset 3"),
    ("corrupted", f"sequence {SEQ_ID}, offset 3 .*corrupted"), ("prompt", f"sequence {SEQ_ID}, offset 0 .*different prompts"),
])  # fmt: skip
def test_a_damaged_stream_is_an_error_on_every_scorer_rank(kind: str, where: str) -> None:
    for message in run_ranks(3, f"{JOBS}damaged", kind=kind)[1:]:
        assert re.search(where, message), message


def gather(
    rounds: Sequence[Sequence[Sequence[ChunkRow]]], figures: Sequence[Mapping[str, float]]
) -> tuple[list[list[ChunkRow]], list[dict[str, float]], Traffic]:
    rank, group, traffic = dist.get_rank(), dist.group.WORLD, Traffic()
    assert group is not None
    with traffic.watched(), traffic.counting():
        rows = [list(gather_rows(ChunkRows.of(by_rank[rank]), group)) for by_rank in rounds]
        return rows, gather_figures(figures[rank], group), traffic


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def test_rows_and_figures_of_all_ranks_arrive_to_the_bit() -> None:
    odd = [-0.0, -5e-324, -math.inf, math.nextafter(-1.0, 0.0)]
    first = [
        [ChunkRow(7, 3, [5, 2**31, 0, 1], odd, odd[::-1], 4, 19, "eos"), ChunkRow(9, 0, [], [], [], 4)], [],
        [ChunkRow(2, 11, [8], [-0.1], [-0.2], 3, 16, "stop"), ChunkRow(3, 0, [1, 1], [0.0, -1.0], [-3.0, 0.1], 4)],
    ]  # fmt: skip
    nothing: list[list[ChunkRow]] = [[], [], []]
    figures: list[dict[str, float]] = [{"loss": 0.1 + 0.2, "max_ratio": math.inf}, {}, {"b": -0.0, "a": 5e-324}]
    answers: Any = run_ranks(3, f"{JOBS}gather", rounds=[first, nothing], figures=figures)
    for (rows, none), found, traffic in answers:
        assert rows == [row for own in first for row in own] and none == []
        assert bits(rows[0].logprobs) == bits(odd) and bits(rows[0].sampling_logprobs) == bits(odd[::-1])
        assert found == figures and bits([found[2]["b"]]) == bits([-0.0]) and list(found[2]) == ["b", "a"]
        assert traffic.calls == {"all_gather": 6} and traffic.pickled == 0


def connections(sizes: list[int]) -> list[tuple[int, int, int]]:
    """Files of this rank for a group of so many ranks: made, connected, added by collectives; zeros on other ranks."""
    return [_connections(size) for size in sizes]


def _connections(size: int) -> tuple[int, int, int]:
    held = [_files()]
    group = new_group(range(size), "some")
    held.append(_files())
    belongs = dist.get_rank() < size
    if belongs:
        connect_pairs(group)
    held.append(_files())
    if belongs:
        _use(group, size)
    held.append(_files())
    before, made, connected, used = held
    return (made - before, connected - made, used - connected)


def _use(group: dist.ProcessGroup, size: int) -> None:
    one = torch.zeros(1)
    dist.all_reduce(one, group=group)
    dist.all_reduce(torch.zeros(1 << 18), op=dist.ReduceOp.MAX, group=group)
    for source in range(size):
        dist.broadcast(one, source, group=group)
    dist.broadcast_object_list([1], src=size - 1, group=group)
    dist.all_gather([torch.zeros(1) for _ in range(size)], one, group=group)
    dist.all_gather_object([None] * size, 1, group=group)
    dist.all_gather_single(torch.zeros(size), one, group=group)
    dist.reduce_scatter_single(one, torch.zeros(size), group=group)
    dist.barrier(group)


def _files() -> int:
    """Files of this process when all ranks are here: a connection that another rank made is a file of this one, too."""
    dist.barrier()
    time.sleep(0.1)
    found = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    return found


@pytest.mark.parametrize(("how", "made", "connected"), [(LATE, 4, 1), pytest.param(AT_ONCE, 5, 0, marks=pytest.mark.long)])
def test_threads_files_and_store_operations_of_a_group(how: str, made: int, connected: int) -> None:
    """3 threads; 4 files and an operation, and one and two for each connection; by itself torch takes n + 3 and 2 n + 1."""
    found = measured(2, 4, how)
    assert (found["threads"], found["files"], found["connected_files"]) == (3, made, connected)
    assert (found["operations"], found["connected_operations"]) == (1 if connected else 5, 2 * connected)
    assert found["other_operations"] == 0 and found["made_ms"] > 0 and found["used_ms"] > 0


def test_a_group_takes_as_much_to_make_however_many_ranks_it_has() -> None:
    """Counted in a process that has no threads of other tests, which may end while they are counted."""
    code = "import json, torch.distributed as dist; from benchmarks.groups import alone; "
    code += "print(json.dumps([[alone(size, 2), dist.is_initialized()] for size in (2, 1024, 4096)]))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for found, initialized in json.loads(printed):
        assert (found["threads"], found["files"], found["operations"]) == (3, 4, 1) and not initialized


def test_no_collective_of_a_run_connects_more_ranks_than_its_start_does() -> None:
    """Pairs in gloo's ring and trees are all those of its barrier."""
    sizes = [2, 3, 5, 6, 7, 8]
    found = run_ranks(8, f"{JOBS}connections", sizes=sizes)
    assert found == [[(4, peers(size), 0) if rank < size else (0, 0, 0) for size in sizes] for rank in range(8)]
