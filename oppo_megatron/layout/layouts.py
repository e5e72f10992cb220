from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt, lcm, prod
from typing import NamedTuple, Protocol

SHOWN = 3


class HasSizes(Protocol):
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dp(self) -> int: ...


class Sizes(NamedTuple):
    """In training, `vpp`: virtual stages per rank; `cp`: ranks that share each sequence; `ep`: replicas that divide experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, layout: HasSizes, vpp: int = 1) -> Sizes:
        more = (getattr(layout, size, 1) for size in ("cp", "ep"))  # layouts of decoding and scoring have none
        return cls(layout.tp, layout.pp, layout.dp, vpp, *more)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        text = f"tp {self.tp} x pp {self.pp} x dp {self.dp}" + f" x cp {self.cp}" * (self.cp > 1)
        more = [f"{name} {count}" for name, count in (("vpp", self.vpp), ("ep", self.ep)) if count > 1]
        return f"{text} with {' and '.join(more)}" if more else text


@dataclass(frozen=True)
class Limits:
    """tp divides `width`, pp * vpp `layers`; at most a replica per sequence; each tensor rank has a row of the vocabulary.

    `experts`: of a layer, which tp * ep divides; ep divides dp.
    """

    width: int
    layers: int
    sequences: int | None = None
    min_tp: int = 1
    vocab_size: int | None = None
    experts: int = 1

    def admits(self, sizes: Sizes) -> bool:
        return (
            self.width % sizes.tp == 0
            and sizes.tp >= self.min_tp
            and self.layers % (sizes.pp * sizes.vpp) == 0
            and (sizes.vpp == 1 or sizes.pp > 1)
            and (self.sequences is None or sizes.dp <= self.sequences)
            and (self.vocab_size is None or fills_shards(self.vocab_size, sizes.tp))
            and self.divided(sizes) == sizes
        )

    def divided(self, sizes: Sizes) -> Sizes:
        """Return the sizes with the largest ep that divides the asked one and fits."""
        return sizes._replace(ep=1 if sizes.cp > 1 else gcd(sizes.ep, sizes.dp, self.experts // sizes.tp or 1))


def layouts_of(num_ranks: int, limits: Limits, *, interleaved: bool = False, cp: int = 1, ep: int = 1) -> Iterator[Sizes]:
    cp = gcd(num_ranks, cp)
    num_ranks //= cp
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            one = limits.divided(Sizes(tp, pp, num_ranks // tp // pp, cp=cp, ep=ep))
            counts = divisors(limits.layers // pp) if interleaved and limits.layers % pp == 0 else (1,)
            yield from (sizes for vpp in counts if limits.admits(sizes := one._replace(vpp=vpp)))


def nearest_layouts(asked: Sizes, num_ranks: int, limits: Limits, also: Callable[[Sizes], bool]) -> list[Sizes]:
    """Layouts of `num_ranks`, the nearest to `asked` first (by the product of the sizes' ratios), then smaller tp, pp."""
    found = layouts_of(num_ranks, limits, interleaved=asked.vpp > 1, cp=asked.cp, ep=asked.ep)
    return sorted(filter(also, found), key=lambda sizes: (_distance(sizes, asked), sizes))


def nearest_counts(num_ranks: int, limits: Limits, also: Callable[[Sizes], bool] = lambda sizes: True) -> list[int]:
    """Numbers of ranks with a layout, nearest first."""
    most = num_ranks + SHOWN if limits.sequences is None else limits.sequences
    counts: set[int] = set()
    for tp in (tp for tp in divisors(limits.width) if tp >= limits.min_tp):
        for pp in divisors(limits.layers):
            nearest = min(num_ranks // (tp * pp), most)  # other numbers are further away
            replicas = range(max(1, nearest - SHOWN), min(most, nearest + SHOWN) + 1)
            counts.update(tp * pp * dp for dp in replicas if also(Sizes(tp, pp, dp)))
    return sorted(counts, key=lambda count: (abs(count - num_ranks), count))


def suggestion(asked: Sizes, num_ranks: int, limits: Limits | None, also: Callable[[Sizes], bool] = lambda sizes: True) -> str:
    """End of an error message; empty for an unknown model."""
    if limits is None:
        return ""
    fitting = nearest_layouts(asked, num_ranks, limits, also)[:SHOWN]
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    if fitting:
        return f"; nearest that fit {ranks}: {', '.join(map(str, fitting))}"
    counts = [count for count in nearest_counts(num_ranks, limits, also) if count != num_ranks][:SHOWN]
    if not counts:
        return f"; no layout over {ranks} would do"
    return f"; no layout fits {ranks}, the nearest numbers that one fits are {', '.join(map(str, counts))}"


def vocab_rows(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Embedding rows per tensor rank; their total also divides by `multiple`."""
    step = lcm(tp, multiple)
    return -(-vocab_size // step) * step // tp


def fills_shards(vocab_size: int, tp: int, multiple: int = 1) -> bool:
    return vocab_size > (tp - 1) * vocab_rows(vocab_size, tp, multiple)


def divisors(number: int) -> tuple[int, ...]:
    small = [part for part in range(1, isqrt(number) + 1) if number % part == 0]
    return tuple(small + [number // part for part in reversed(small) if part * part != number])


def _distance(one: Sizes, other: Sizes) -> Fraction:
    return prod((Fraction(max(pair), min(pair)) for pair in zip(one, other, strict=True)), start=Fraction(1))
