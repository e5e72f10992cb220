"""Defects of kinds that show on a GPU alone: each is planted into the product of one rank's process, and has to be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

QUICK: dict[str, Any] = {"steps": 1, "checkpoint.every_steps": 0}


@dataclass(frozen=True)
class Defect:
    """`told` is part of an error, a fault or a wait ("phase: kind in place") of a rehearsal of `case`, quickly done."""

    case: str
    told: str
    plant: Callable[[], None]
    changes: dict[str, Any] = field(default_factory=lambda: QUICK)


def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """A function of the product becomes `change(original, *its arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: change(original, *a, **k))


def tensor_of_the_host() -> None:
    from oppo_megatron.engine import device_decode

    def drawn(original: Any, *a: Any) -> Any:
        found = original(*a)
        return replace(found, tokens=torch.zeros(found.tokens.shape, dtype=torch.int64))

    around(device_decode, "draw_at", drawn)


def read_in_the_decode_loop() -> None:
    from oppo_megatron.engine import device_decode

    def drawn(original: Any, *a: Any) -> Any:
        found = original(*a)
        assert found.tokens.min().item() >= 0
        return found

    around(device_decode, "draw_at", drawn)


def read_of_each_figure() -> None:
    from oppo_megatron.train import actor

    around(actor, "stats_dict", lambda original, stats: {k: v + 0 * float(v) for k, v in original(stats).items()})


def streams_that_do_not_wait() -> None:
    from tests.rehearsal.device import Stream

    Stream.wait_stream = lambda *_: None  # type: ignore[method-assign]


def copy_from_pageable_memory() -> None:
    from oppo_megatron.engine import scoring

    scoring.on_device = lambda values, device, *_: torch.tensor(values, device=device)  # type: ignore[assignment]


def mask_that_no_kernel_takes() -> None:
    from oppo_megatron.mcore.kv import cached_plan

    def attend(q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        q_SN1D = q_SGRD.flatten(1, 2).unsqueeze(2)
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q_SN1D, k_SGLD, v_SGLD, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.reshape(len(q_SGRD), -1)

    cached_plan.attend_one = attend


def type_of_one_rank_alone() -> None:
    from oppo_megatron.mcore.vocab_shards import VocabShards

    def gather(original: Any, shards: Any, mine: Tensor) -> Tensor:
        return original(shards, mine.double() if shards.rank == 1 else mine)

    around(VocabShards, "gather", gather)


def links_that_are_not_opened() -> None:
    from oppo_megatron.engine import links

    links.Links.use_once = lambda *_: None  # type: ignore[method-assign]


def message_of_another_type() -> None:
    from oppo_megatron.engine.scoring import ScoringWorker

    around(ScoringWorker, "outbox", lambda original, *a: [tensor.float() for tensor in original(*a)])


def wait_with_a_time() -> None:
    from oppo_megatron.engine.executor import Executor

    def run(original: Any, executor: Any, *a: Any, **k: Any) -> None:
        executor.device = torch.device("cpu")  # where the host has to wait anyway
        original(executor, *a, **k)

    around(Executor, "run", run)


def group_of_other_ranks() -> None:
    from oppo_megatron.train.trained_role import TrainedRole

    def share(original: Any, role: Any, stats: Any, names: Any) -> dict[str, float]:
        dist.broadcast(torch.zeros(1, device="cuda"), 0, group=dist.GroupMember.NON_GROUP_MEMBER)
        return original(role, stats, names)

    around(TrainedRole, "share", share)


def batch_before_all_are_connected() -> None:
    from oppo_megatron.train import topology

    topology.use_once = lambda *_: None  # type: ignore[assignment]


def neighbours_that_have_not_met() -> None:
    from oppo_megatron.train import topology

    topology.use_ring_once = lambda *_: None  # type: ignore[assignment]


def weight_left_on_the_host() -> None:
    from oppo_megatron.train.trained_role import TrainedRole

    def publish(original: Any, role: Any) -> Any:
        moved = original(role)
        if role.reallocation is not None:
            layer = role.serving.decoder.layers[0].self_attention.linear_proj
            layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape, dtype=layer.weight.dtype))
            role.serving.end_weight_update()
        return moved

    around(TrainedRole, "publish", publish)


DEFECTS = {
    "a tensor of the host": Defect("single", "on the same device", tensor_of_the_host),
    "a read in the decode loop": Defect("single", "decode step: read in defects.py drawn", read_in_the_decode_loop),
    "a read in a captured step": Defect("single", "waits (read) in a step that is captured", read_in_the_decode_loop),
    "a read of each figure": Defect("single", "update: read in defects.py", read_of_each_figure),
    "streams that do not wait": Defect(
        "single", "another stream has written, without a wait", streams_that_do_not_wait
    ),
    "a copy from pageable memory": Defect("single", "score: pageable in defects.py", copy_from_pageable_memory),
    "a mask that no kernel takes": Defect("single", "no kernel of attention takes this", mask_that_no_kernel_takes),
    "a type of one rank alone": Defect("colocated tp 2", "calls differ", type_of_one_rank_alone),
    "links that are not opened": Defect("colocated pp 2", "the first message with rank", links_that_are_not_opened),
    "a message of another type": Defect("colocated pp 2", "sends ('torch.float32'", message_of_another_type),
    "a wait with a time": Defect("colocated pp 2", "round: wait with a time", wait_with_a_time),
    "a group of other ranks": Defect("disaggregated", "that it is no member of", group_of_other_ranks),
    "a batch of messages first": Defect(
        "updated as pp 2", "batched messages are the first", batch_before_all_are_connected
    ),
    "neighbours that have not met": Defect(
        "updated as pp 2, interleaved", "is made in the run's work", neighbours_that_have_not_met
    ),
    "a weight left on the host": Defect(
        "dp 2, updated as tp 2", "on the same device", weight_left_on_the_host, {"checkpoint.every_steps": 0}
    ),
}
