"""A small deterministic mutation fuzzer, and a time limit for what it is let loose on."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


def mutants(seeds: Sequence[bytes], dictionary: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of `seeds`: one to four cuts, repeats, flips, shuffled lines, insertions of `dictionary`."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _mutate(data, dictionary, rng)
        yield bytes(data)


def _mutate(data: bytearray, dictionary: Sequence[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 40)))
    kind = rng.choice((0, 1, 2, 3, 4, 5, 5, 5, 6))
    if kind == 0:
        del data[start:end]
    elif kind == 1:
        data[start:start] = data[start:end] * rng.randint(1, 3)
    elif kind == 2 and start < len(data):
        data[start] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[start:]
    elif kind == 4:
        lines = data.split(b"\n")
        rng.shuffle(lines)
        data[:] = b"\n".join(lines)
    elif kind == 5:  # a value, between what separates values
        places = [i + 1 for i, byte in enumerate(data) if byte in b":,[ ="] or [0]
        start = rng.choice(places)
        stop = next((i for i in range(start, len(data)) if data[i] in b",}]\n"), len(data))
        data[start:stop] = b" " + rng.choice(dictionary)
    else:
        data[start:start] = rng.choice(dictionary)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise AssertionError if the block takes more seconds of CPU time, which other work on the machine does not lengthen."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
