"""Defects of kinds that show on a GPU alone: each is planted into the product of one rank's process, and has to be found."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oppo_megatron.engine import device_decode, round_state, scoring
from oppo_megatron.engine.executor import Executor, Links
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.mcore.kv import cached_plan
from oppo_megatron.mcore.vocab import VocabShards
from oppo_megatron.schedule.actions import Op, Payload
from oppo_megatron.train import actor, roles, supervised
from oppo_megatron.train.roles import TrainedRole
from tests.rehearsal.device import Stream

QUICK: dict[str, Any] = {"steps": 1, "checkpoint.every_steps": 0}


@dataclass(frozen=True)
class Defect:
    """`told` is part of an error, fault or wait ("phase: kind in place") of a rehearsal of `case`; bars separate alternatives."""

    case: str
    told: str
    plant: Callable[[], None]
    changes: dict[str, Any] = field(default_factory=lambda: QUICK)


def around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """A function of the product becomes `change(original, *its arguments)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: change(original, *a, **k))


def without(owner: Any, name: str) -> Callable[[], None]:
    """A function of the product does nothing."""
    return lambda: setattr(owner, name, lambda *_: None)


def in_draws(change: Callable[[Tensor], Tensor]) -> None:
    """Tokens that are drawn on the device become `change(tokens)`."""

    def drawn(original: Any, *a: Any) -> Any:
        found = original(*a)
        return replace(found, tokens=change(found.tokens))

    around(device_decode, "draw_at", drawn)


def read_in_the_decode_loop() -> None:
    in_draws(lambda tokens: tokens + 0 * tokens.min().item())


def mask_that_no_kernel_takes() -> None:
    def attend(q_SGRD: Tensor, k_SGLD: Tensor, v_SGLD: Tensor, mask: Tensor | None, scale: float, *_: None) -> Tensor:
        q_SN1D = q_SGRD.flatten(1, 2).unsqueeze(2)
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q_SN1D, k_SGLD, v_SGLD, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.reshape(len(q_SGRD), -1)

    cached_plan.attend_one = attend


def type_of_one_rank_alone() -> None:
    def gather(original: Any, shards: Any, mine: Tensor) -> Tensor:
        return original(shards, mine.double() if shards.rank == 1 else mine)

    around(VocabShards, "gather", gather)


def wait_with_a_time() -> None:
    def run(original: Any, executor: Any, *a: Any, **k: Any) -> None:
        executor.device = torch.device("cpu")  # where the host has to wait anyway
        original(executor, *a, **k)

    around(Executor, "run", run)


def group_of_other_ranks() -> None:
    def share(original: Any, role: Any, stats: Any, names: Any) -> dict[str, float]:
        dist.broadcast(torch.zeros(1, device="cuda"), 0, group=dist.GroupMember.NON_GROUP_MEMBER)
        return original(role, stats, names)

    around(TrainedRole, "share", share)


def weight_left_on_the_host() -> None:
    def publish(original: Any, role: Any) -> Any:
        moved = original(role)
        if role.reallocation is not None:
            layer = role.serving.decoder.layers[0].self_attention.linear_proj
            layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape, dtype=layer.weight.dtype))
            role.serving.end_weight_update()
        return moved

    around(TrainedRole, "publish", publish)


def receive_without_a_wait() -> None:
    class Forgotten:
        def __init__(self, work: Any):
            self.work = work

        def wait(self, *_: Any) -> None:
            """Nobody waits."""

    around(dist, "irecv", lambda original, *a, **k: Forgotten(original(*a, **k)))


def buffer_sent_again() -> None:
    """One buffer for all hidden states of a role, also while it is sent."""
    kept: dict[str, Tensor] = {}

    def outbox(original: Any, worker: Any, action: Any) -> list[Tensor]:
        (hidden,) = original(worker, action)
        sent = kept.setdefault(worker.role, hidden.new_empty(10**5))[: hidden.numel()].view(hidden.shape)
        return [sent.copy_(hidden)]

    around(ScoringWorker, "outbox", outbox)


def messages_that_change_places() -> None:
    """Critic and reference have alike hidden states of a prompt: rank 1 takes one for the other."""
    other = {"critic": "reference", "reference": "critic"}

    def of(original: Any, links: Any, action: Any) -> Any:
        if action.payload is Payload.HIDDEN and action.op is Op.RECV:
            action = replace(action, role=other.get(action.role, action.role))
        return original(links, action)

    around(Links, "of", of)


def message_that_nobody_takes() -> None:
    def finish_sends(original: Any, executor: Any) -> None:
        for (source, destination, *_), group in executor.links.groups.items():
            if source == executor.rank:
                dist.isend(torch.zeros(1, device="cuda"), destination, group)
        original(executor)

    around(Executor, "finish_sends", finish_sends)


def sum_without_a_wait() -> None:
    def gather(original: Any, shards: Any, mine: Tensor) -> Tensor:
        count = torch.ones(1, device=mine.device)
        dist.all_reduce(count, group=shards.group, async_op=True)
        return original(shards, mine * count)

    around(VocabShards, "gather", gather)


def pinned_memory_used_again() -> None:
    buffer = torch.zeros(1000, dtype=torch.int64).pin_memory()

    def on_device(values: Any, device: torch.device, *_: Any) -> Tensor:
        buffer[: len(values)].copy_(torch.tensor(values))
        return buffer[: len(values)].to(device, non_blocking=True)

    round_state.on_device = on_device


def memory_freed_too_early() -> None:
    """The scorers read what the round's decoding has made, once it is there; it is freed while they do."""
    made: list[Tensor] = []

    def compute(original: Any, worker: Any, action: Any) -> int:
        made.append(torch.zeros(4, device="cuda"))
        return original(worker, action)

    def score(original: Any, worker: Any, batch: Any) -> int:
        for each in made:
            each.sum()
        made.clear()
        return original(worker, batch)

    around(DecodeWorker, "compute", compute)
    around(ScoringWorker, "_score", score)


def captured_step_that_reads_what_moves() -> None:
    one: list[Tensor] = []

    def step(original: Any, lane: Any) -> None:
        one[:] = [torch.ones(1, dtype=torch.int64, device="cuda")]
        original(lane)

    around(device_decode.DeviceLane, "step", step)
    in_draws(lambda tokens: tokens * one[0])


def objects_in_a_round() -> None:
    def run(original: Any, executor: Any, *a: Any, **k: Any) -> None:
        dist.all_gather_object([None] * dist.get_world_size(), "rows")
        original(executor, *a, **k)

    around(Executor, "run", run)


MANY_MICRO_BATCHES = QUICK | {"runtime.micro_batch_tokens": 64, "rollout.batch_size": 8}
DEVICES_DIFFER = "on the same device | two different devices"  # torch 2.13 and 2.11
DEFECTS = {
    "a tensor of the host": Defect("single", DEVICES_DIFFER,
        lambda: in_draws(lambda tokens: torch.zeros(tokens.shape, dtype=torch.int64))),
    "a read in the decode loop": Defect("single", "decode step: read in defects.py", read_in_the_decode_loop),
    "a read in a captured step": Defect("single", "waits (read) in a step that is captured", read_in_the_decode_loop),
    "a read of each figure": Defect("single", "update: read in defects.py", lambda: around(actor, "stats_dict",
        lambda original, stats: {k: v + 0 * float(v) for k, v in original(stats).items()})),
    "streams that do not wait": Defect("single", "another stream has written, without a wait", without(Stream, "wait_stream")),
    "a copy from pageable memory": Defect("single", "score: pageable in defects.py",
        lambda: setattr(scoring, "on_device", lambda values, device, *_: torch.tensor(values, device=device))),
    "a mask that no kernel takes": Defect("adapters, dense", "no kernel of attention takes this", mask_that_no_kernel_takes),
    "a type of one rank alone": Defect("colocated tp 2", "calls differ", type_of_one_rank_alone),
    "links that are not opened": Defect("colocated pp 2", "the first message with rank", without(Links, "use_once")),
    "a message of another type": Defect("colocated pp 2", "sends ('torch.float32'",
        lambda: around(ScoringWorker, "outbox", lambda original, *a: [tensor.float() for tensor in original(*a)])),
    "a wait with a time": Defect("colocated pp 2", "round: wait with a time", wait_with_a_time),
    "a group of other ranks": Defect("disaggregated", "that it is no member of", group_of_other_ranks),
    "a batch of messages first": Defect("updated as pp 2", "batched messages are the first", without(roles, "use_once")),
    "neighbours that have not met": Defect("updated as pp 2, interleaved", "is made in the run's work",
        without(roles, "use_ring_once")),
    "neighbours of a ring that have not met": Defect("dp 2, updated as cp 2 in a ring", "is made in the run's work",
        without(roles, "connect_ring")),
    "neighbours of a supervised ring that have not met": Defect("sft, cp 2 in a ring", "is made in the run's work",
        without(supervised, "connect_ring"), {}),
    "a weight left on the host": Defect("dp 2, updated as tp 2", DEVICES_DIFFER, weight_left_on_the_host,
        {"checkpoint.every_steps": 0}),
    "a receive without a wait": Defect("colocated pp 2", "another stream has written, without a wait", receive_without_a_wait),
    "a buffer sent again": Defect("colocated pp 2", "writes what another stream still reads", buffer_sent_again,
        MANY_MICRO_BATCHES),
    "messages that change places": Defect("colocated pp 2", "sends what is about", messages_that_change_places),
    "a message that nobody takes": Defect("colocated pp 2", "sent and not taken", message_that_nobody_takes),
    "a sum without a wait": Defect("colocated tp 2", "another stream has written, without", sum_without_a_wait),
    "a copy that is read too early": Defect("single", "may not have brought yet",
        lambda: setattr(FakeTensor, "tolist", lambda tensor: tensor.to("cpu", non_blocking=True).tolist())),
    "pinned memory used again": Defect("single", "may not have read yet", pinned_memory_used_again),
    "memory freed too early": Defect("single", "freed while another stream", memory_freed_too_early),
    "a captured step that reads what moves": Defect("single", "replayed over memory that has been freed",
        captured_step_that_reads_what_moves),
    "objects in a round": Defect("disaggregated", "pickled objects go between ranks", objects_in_a_round),
}  # fmt: skip
