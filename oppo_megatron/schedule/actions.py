"""Actions of a rank, and schedules of all ranks for one round; docs/schedule.md describes the text form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from oppo_megatron.errors import ScheduleError


class Op(Enum):
    """All tensor ranks of a stage take part in decode, sample, prefill and score."""

    DECODE = "decode"  # one token for every sequence of a decode micro-batch, through this rank's stage
    SAMPLE = "sample"  # last stage: draw the tokens of a decode micro-step
    PREFILL = "prefill"  # new tokens of a role's micro-batch through this rank's stage; for the actor: prompts
    SCORE = "score"  # last stage: log-probs, values or scores of a prefilled micro-batch
    SEND = "send"
    RECV = "recv"
    GATHER = "gather"  # the replicas of the actor exchange their chunks; all ranks of the actor take part


class Payload(Enum):
    HIDDEN = "hidden"  # activations, to the next pipeline stage of the same replica and tensor shard
    TOKENS = "tokens"  # drawn tokens, from the last stage to the others of the same replica and tensor shard
    CHUNK = "chunk"  # a decoded chunk, to ranks that do not hold the actor


@dataclass(slots=True, unsafe_hash=True)
class Action:
    """One action of one rank, not to be changed; frozen instances take three times as long to create."""

    rank: int
    op: Op
    role: str
    micro_batch: int
    chunk: int
    step: int | None = None
    payload: Payload | None = None
    peer: int | None = None

    def __str__(self) -> str:
        words = [self.op.value]
        if self.payload is not None:
            words.append(self.payload.value)
        words += [self.role, f"m{self.micro_batch}", f"c{self.chunk}"]
        if self.step is not None:
            words.append(f"s{self.step}")
        if self.peer is not None:
            words += ["->" if self.op is Op.SEND else "<-", str(self.peer)]
        return " ".join(words)


_NUMBER = "[0-9]{1,9}"  # bounded, because int() refuses thousands of digits
_RANK = re.compile(f"rank ({_NUMBER})")
_ACTION = re.compile(
    r"(?P<op>[a-z]+)(?: (?P<payload>hidden|tokens|chunk))? (?P<role>[a-z]+) "
    rf"m(?P<m>{_NUMBER}) c(?P<c>{_NUMBER})(?: s(?P<s>{_NUMBER}))?(?: (?P<arrow>->|<-) (?P<peer>{_NUMBER}))?"
)


def parse_action(rank: int, text: str) -> Action:
    text = text.strip()
    found = _ACTION.fullmatch(text)
    if found is None or found["op"] not in {op.value for op in Op}:
        raise ScheduleError(
            f"{text!r} is not an action; write it as `decode actor m0 c1 s0` or `send hidden actor m0 c1 s0 -> 1`"
        )
    op, message = Op(found["op"]), found["op"] in ("send", "recv")
    arrow = {Op.SEND: "->", Op.RECV: "<-"}.get(op)
    if message != (found["payload"] is not None) or arrow != found["arrow"]:
        raise ScheduleError(f"{text!r}: only send (->) and recv (<-) have a payload and a peer, and they need both; correct it")
    return Action(
        rank,
        op,
        found["role"],
        int(found["m"]),
        int(found["c"]),
        None if found["s"] is None else int(found["s"]),
        Payload(found["payload"]) if found["payload"] else None,
        None if found["peer"] is None else int(found["peer"]),
    )


@dataclass(frozen=True)
class Schedule:
    actions: Mapping[int, tuple[Action, ...]]

    def __iter__(self) -> Iterator[Action]:
        return (action for rank in sorted(self.actions) for action in self.actions[rank])

    def of(self, rank: int) -> tuple[Action, ...]:
        return self.actions.get(rank, ())

    def shifted(self, chunks: int) -> Schedule:
        return Schedule({r: tuple(replace(a, chunk=a.chunk + chunks) for a in own) for r, own in self.actions.items()})

    def text(self) -> str:
        return "".join(f"rank {rank}\n" + "".join(f"  {each}\n" for each in self.actions[rank]) for rank in sorted(self.actions))


def parse_schedule(text: str) -> Schedule:
    """Read the text form. Raises ScheduleError with the line number."""
    actions: dict[int, list[Action]] = {}
    rank: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        heading = _RANK.fullmatch(line.strip())
        if heading:
            rank = int(heading[1])
            if rank in actions:
                raise ScheduleError(f"line {number}: rank {rank} has a second list; write each rank once")
            actions[rank] = []
        elif rank is None:
            raise ScheduleError(f"line {number}: {line.strip()!r} comes before any `rank N` line; add one")
        else:
            try:
                actions[rank].append(parse_action(rank, line))
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from error
    return Schedule({rank: tuple(own) for rank, own in actions.items()})
