"""Tells from a thread's stack whether it is within a call of torch.distributed that waits for other ranks.

Such calls need no marks, also those within megatron-core and `torch.distributed.checkpoint`.  gloo's calls block the host.
NCCL's return at once, except barriers: the host blocks when it next asks the device for something.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch.distributed.distributed_c10d as c10d

CALLS = c10d.__file__
SENDERS = "/torch/", "/megatron/core/", "/oppo_megatron/cluster/", "/oppo_megatron/engine/", "/oppo_megatron/mcore/"


def waits_in(thread: int) -> str | None:
    """The call in which a thread (`threading.get_ident`) waits for other ranks; None where it is at something else.

    "": it waits for the end of one that was begun before.
    """
    frames = list(_frames(sys._current_frames().get(thread)))
    calls = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename == CALLS]
    if calls:
        return calls[-1]  # the one that was called: all_gather_object, say, not the all_gather within
    return "" if frames and _awaits_message(frames[0]) else None


def _awaits_message(innermost: FrameType) -> bool:
    """`Work.wait` is no Python function: the innermost frame is its caller's, which is code that sends messages."""
    code = innermost.f_code
    return "wait" in code.co_names and any(folder in code.co_filename for folder in SENDERS)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames, from the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back
