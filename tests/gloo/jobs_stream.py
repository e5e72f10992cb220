"""A token stream from rank 0 to the other ranks: whole, and damaged on its way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oppo_megatron.errors import StreamError
from oppo_megatron.records import Chunk, ChunkRow, Prompt, Rollout
from oppo_megatron.runtime.stream import TokenStream, build_stream_groups, share

CPU = torch.device("cpu")
SEQ_ID = 31


def rollout(prompt: tuple[int, ...] = (1, 2)) -> Rollout:
    return Rollout(Prompt(SEQ_ID, 0, "", prompt), 0)


def chunks(number: int) -> list[Chunk]:
    """Chunks of 3 tokens, each second one empty."""
    made, offset = [], 0
    for index in range(number):
        rows = []
        if index % 2 == 0:
            tokens = [10 * index + t for t in range(3)]
            rows = [ChunkRow(SEQ_ID, offset, tokens, [-0.1 * (t + 1) for t in tokens], [-0.2] * 3, index)]
            offset += 3
        made.append(Chunk(index, 5 * index, rows))
    return made


def open_stream(prompt: tuple[int, ...] = (1, 2)) -> TokenStream:
    groups = build_stream_groups(0, list(range(1, dist.get_world_size())))
    stream = TokenStream(groups, sends=dist.get_rank() == 0, device=CPU)
    stream.admit([rollout(prompt)])
    return stream


def whole(number: int) -> dict[str, Any]:
    """What arrives, and a vector shared from the last rank."""
    stream, got = open_stream(), []
    if stream.sends:
        for chunk in chunks(number):
            stream.send(chunk)
        stream.drain()
        assert not stream._pending
    else:
        got = [stream.receive() for _ in range(number)]
    stream.retire([rollout()])
    last = dist.get_world_size() - 1
    values = torch.tensor([0.5, -3.0]) if dist.get_rank() == last else None
    return {"got": got, "shared": share(values, 2, last, CPU).tolist()}


def damaged(kind: str) -> str:
    """The error at the receiving end, on every scorer rank."""
    stream = open_stream((1, 3) if kind == "prompt" and dist.get_rank() == 0 else (1, 2))
    if stream.sends:
        _send_damaged(stream, kind)
        return ""
    try:
        for _ in range(3):
            stream.receive()
    except StreamError as error:
        if kind in ("lost", "repeated") and dist.get_rank() == stream.groups.sink:
            leftover = torch.empty(7 + 3 * 3, dtype=torch.int64)  # one row of three tokens
            dist.recv(leftover, 0, group=stream.groups.link)  # the payload whose header was refused
        return str(error)
    return "no error"


def _send_damaged(stream: TokenStream, kind: str) -> None:
    first, empty, third = chunks(3)
    messages = [stream.encoder.encode(chunk) for chunk in (first, empty, third)]
    if kind == "lost":
        messages = [messages[0], messages[2]]
    elif kind == "repeated":
        messages = [messages[0], messages[0]]
    elif kind == "corrupted":
        messages[2][1][8] ^= 4  # a token of the third message
    elif kind == "prompt":
        messages = messages[:1]
    for message in messages:
        for words in message:
            dist.send(torch.from_numpy(np.ascontiguousarray(words)), stream.groups.sink, group=stream.groups.link)
