"""Out of memory: repeating work with less at once, and the limits found.

Each rank has three limits, shared by all its roles: tokens of a trained micro-batch, tokens of a prefilled (scored) one, and
sequences decoded at once.  Each begins without a bound, is halved when memory runs out, and holds for the rest of the run.

A rank alone with its work repeats it at once.  If peers compute the same micro-batch (tensor or pipeline parallelism) it
cannot: `LessAtOnce` ends the ranks, and the run restarts with the limit on every rank
(`rundir/memory_limits.py`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from oppo_megatron.errors import CapacityError, OppoError
from oppo_megatron.schedule.rounds import Batch, Growth

ResultT = TypeVar("ResultT")
CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
NO_KERNEL = "could not create a primitive"
"""All that torch tells of oneDNN where it has no memory for a kernel's code.  (Of what it has no kernel for it says more.)"""
LimitName = Literal["train", "score", "decode"]
LESS = "lower runtime.micro_batch_tokens, runtime.kv_cache_mb or rollout.max_response_tokens, or use more ranks"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: torch's on a GPU or on the host (which has no class of its own), numpy's or Python's."""
    if isinstance(error, OppoError):
        return False
    told = isinstance(error, RuntimeError) and (
        str(error) == NO_KERNEL or any(words in str(error) for words in CPU_WORDS)
    )
    return told or isinstance(error, (torch.OutOfMemoryError, MemoryError))


class LessAtOnce(CapacityError):
    """This rank ran out of memory among peers: with at most `most` of what `limit` bounds the run may go on."""

    def __init__(self, message: str, limit: LimitName, most: int):
        super().__init__(message)
        self.limit, self.most = limit, most


@dataclass(frozen=True)
class Done(Generic[ResultT]):
    """What `attempt` gives where the work was done."""

    result: ResultT


@dataclass(frozen=True)
class Exhausted:
    """What `attempt` gives where memory ran out; `told` is the allocator's first sentence."""

    told: str


def attempt(work: Callable[[], ResultT]) -> Done[ResultT] | Exhausted:
    """Do the work; where memory runs out, everything that it held is free again when this returns."""
    try:
        return Done(work())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        told = _first_sentence(error)
    # Behind the handler: the exception, and with it the frames that held tensors, is gone.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Exhausted(told)


def _first_sentence(error: BaseException) -> str:
    """What the allocator says, without where in its sources it says so."""
    text = str(error).partition("\n")[0]
    return text[max(0, text.find("DefaultCPUAllocator")) :].split(". ")[0] or type(error).__name__


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class MemoryLimit:
    """How much this rank has memory for at once: `most`, in `unit`s; None: no bound has been met.  `times` it was halved."""

    name: LimitName
    what: str
    unit: str
    most: int | None = None
    times: int = 0
    tell: Callable[[str], None] = field(default=_to_stderr, repr=False, compare=False)

    def within(self, budget: int) -> int:
        return budget if self.most is None else min(self.most, budget)

    def lower(self, size: int, told: str, *, last: str | None, obstacle: str | None = None) -> None:
        """`size` was too much: half of it from here on, which is told on stderr.

        Raises CapacityError where it cannot be divided, and `last` names it, and LessAtOnce where this rank cannot decide alone.
        """
        who = f"rank {dist.get_rank() if dist.is_initialized() else 0}"
        if last is not None:
            raise CapacityError(f"{who} has not enough memory for {self.what} of {last} alone ({told}); {LESS}")
        if obstacle is not None:
            raise LessAtOnce(
                f"{who} ran out of memory in {self.what} of {size} {self.unit} ({told}), and cannot take less at once by itself: "
                f"{obstacle}; {LESS}",
                self.name,
                self.within(size // 2),
            )
        self.most = self.within(size // 2)
        self.times += 1
        self.tell(
            f"{who} ran out of memory in {self.what} of {size} {self.unit} ({told}): at most {self.most} from here on"
        )


@dataclass
class MemoryLimits:
    """The memory limits of one rank."""

    train: MemoryLimit = field(default_factory=lambda: MemoryLimit("train", "a training micro-batch", "tokens"))
    score: MemoryLimit = field(default_factory=lambda: MemoryLimit("score", "a prefill micro-batch", "tokens"))
    decode: MemoryLimit = field(default_factory=lambda: MemoryLimit("decode", "a decode step", "sequences"))

    @property
    def all(self) -> tuple[MemoryLimit, MemoryLimit, MemoryLimit]:
        return self.train, self.score, self.decode

    def vector(self) -> list[float]:
        """The bounds (0: none) of training, prefill and decoding, and how often they were halved."""
        return [*(float(each.most or 0) for each in self.all), float(sum(each.times for each in self.all))]

    def resume(self, bounds: Sequence[int]) -> None:
        """Take up bounds (0: none) that an earlier process of the run had come to."""
        for memory_limit, bound in zip(self.all, bounds, strict=True):
            memory_limit.most = bound or None

    def bound(self, most: Mapping[str, int]) -> None:
        """No more than this at once, by the names of limits."""
        for memory_limit in self.all:
            if memory_limit.name in most:
                memory_limit.most = memory_limit.within(most[memory_limit.name])


@dataclass
class Begun:
    """The micro-batch begun last, as long as this rank may begin anew without another noticing: its sequences and tokens.

    `part`: a word for what `sequences` counts, and is not divided; pairs count as one.
    """

    sequences: int = 0
    tokens: int = 0
    part: str = "sequence"

    def note(self, sequences: int, tokens: int, part: str = "sequence") -> None:
        self.sequences, self.tokens, self.part = sequences, tokens, part

    def forget(self) -> None:
        """Nothing may be begun again."""
        self.sequences = 0


def in_smaller_ones(
    work: Callable[[int], ResultT],
    budget: int,
    memory_limit: MemoryLimit,
    begun: Begun,
    obstacle: Callable[[], str | None],
) -> ResultT:
    """`work(tokens)`, which makes micro-batches of at most so many tokens; where memory runs out in one, all of it anew.

    `begun` says in which.  Raises CapacityError where a sequence (or pair) alone does not fit, where memory ran out elsewhere,
    and where there is an `obstacle` to beginning anew.
    """
    while True:
        begun.forget()
        most = memory_limit.within(budget)
        outcome = attempt(partial(work, most))
        if isinstance(outcome, Done):
            return outcome.result
        if not begun.sequences:
            raise CapacityError(
                f"rank {dist.get_rank() if dist.is_initialized() else 0} ran out of memory around {memory_limit.what}: in the "
                f"reduction of gradients or in the optimizer ({outcome.told}); use more ranks, or "
                "train.distributed_optimizer with dp > 1"
            )
        whole = begun.sequences == 1 or begun.tokens > most  # what does not fit the bound cannot be divided
        last = f"one {begun.part}, {begun.tokens} tokens long," if whole else None
        memory_limit.lower(begun.tokens, outcome.told, last=last, obstacle=obstacle())


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """A prefill micro-batch of two tokens or more in two, one after the other; a sequence may have a part in both."""
    left = sum(growth.new for growth in batch) // 2
    first: list[Growth] = []
    second: list[Growth] = []
    for growth in batch:
        head = min(left, growth.new)
        tail = growth.new - head
        left -= head
        rows = min(growth.rows, tail)  # those of the last tokens
        if head:
            first.append(Growth(growth.seq_id, growth.past, head, growth.rows - rows))
        if tail:
            second.append(Growth(growth.seq_id, growth.past + head, tail, rows))
    return tuple(first), tuple(second)
