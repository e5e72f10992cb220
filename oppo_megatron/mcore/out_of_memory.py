"""Running out of memory: an error that names the setting to lower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from oppo_megatron.errors import CapacityError, OppoError

CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
NO_KERNEL = "could not create a primitive"
"""The whole message of oneDNN if it has no memory for a kernel's code.  (An unsupported kernel has a longer message.)"""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocator failed: torch's, on a GPU or on the host (which has no class of its own), numpy's or Python's."""
    if isinstance(error, OppoError):
        return False
    text = str(error)
    on_host = isinstance(error, RuntimeError) and (text == NO_KERNEL or any(words in text for words in CPU_WORDS))
    return on_host or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def memory_for(describe: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Raise CapacityError if memory runs out in the block.  `describe` returns the work and the remedy, each as a phrase."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        work, remedy = describe()
        raise CapacityError(f"memory ran out in {work} ({_first_sentence(error)}); {remedy}") from error


def too_many_tokens(work: str, lengths: Sequence[int], answers: int = 1) -> tuple[str, str]:
    """Work and remedy for a micro-batch of sequences of `lengths` tokens; `answers` of them (2: a pair) stay together."""
    tokens = sum(lengths)
    if len(lengths) <= answers:
        remedy = "lower the maximum lengths of prompts and responses"
    else:
        fewer = max(tokens // 2, answers * max(lengths))
        remedy = f"set runtime.micro_batch_tokens to {fewer} or less"
    return f"{work} of {tokens} tokens", f"{remedy}, or use more ranks"


def too_many_sequences(work: str, sequences: int, cache_bytes: int) -> tuple[str, str]:
    """Work and remedy for decoding `sequences` at once with a KV cache of `cache_bytes` on this rank."""
    megabytes = max(1, cache_bytes // 2**21)
    return (
        f"{work} of {sequences} sequences",
        f"set runtime.kv_cache_mb to {megabytes} or less (this cache takes {-(-cache_bytes // 2**20)} MiB) to decode fewer "
        "sequences at once, or use more ranks",
    )


def _first_sentence(error: BaseException) -> str:
    """The allocator's message without its source location."""
    text = str(error).partition("\n")[0]
    return text[max(0, text.find("DefaultCPUAllocator")) :].split(". ")[0] or type(error).__name__
