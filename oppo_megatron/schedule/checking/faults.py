"""The faults of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from oppo_megatron.schedule.actions import Action


class FaultKind(str, Enum):
    """Kinds of faults; each equals its word (`fault.kind == "deadlock"`)."""

    MISSING = "missing"  # the round asks for an action that no list has
    DOUBLED = "doubled"  # a rank is told to do the same twice
    FOREIGN = "foreign"  # the round asks for no such action, or not of this rank
    LOST_PEER = "lost peer"  # a send that nobody receives, a receive that nobody sends, a wrong peer
    ORDER = "order"  # messages asked for in another order than sent; micro-batches out of their order
    COMMUNICATOR = "communicator"  # its two ends use it in different orders, or one of them from two streams
    TENSOR_RANKS = "tensor ranks"  # the tensor ranks of a stage are told different things
    CAUSALITY = "causality"  # something is used before it is there
    KV = "kv"  # a cache overruns its budget, or lacks the tokens that a micro-batch continues
    PLAN = "plan"  # a rank has planned another round than its peers, each by itself
    DEADLOCK = "deadlock"  # ranks wait for each other, or for a message that never comes


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at `position` of the list of `rank`.

    `action` is None if the list has no such action; `position` is then the list's end.  `message` is a sentence with the fault,
    the rule that it breaks, and the remedy.
    """

    kind: FaultKind
    rank: int
    position: int
    action: Action | None
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.position}, {self.kind.value}: {self.message}"
