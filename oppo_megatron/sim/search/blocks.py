"""Blocks of ranks for roles, up to renumbering, and the price of a step on them (docs/planner.md, end of "The laws").

A block is part of a node or whole nodes. Roles share a block, have disjoint ones, or one has part of another's, not divided
further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from itertools import islice, permutations, product
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.layout.layouts import divisors

FEW_NODES = 2
"""Up to this number, roles may have parts of a node, at several places."""
MANY_NODES = 32
"""Above it, blocks are powers of two of nodes, or the rest of all."""
TRAINERS = "actor, trained"


@dataclass(frozen=True)
class Block:
    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def overlaps(self, other: Block) -> bool:
        return self.first < other.end and other.first < self.end

    def contains(self, other: Block) -> bool:
        return self.first <= other.first and other.end <= self.end

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.end))


Blocks = tuple[Block, ...]
"""Each role's block, in the order of roles."""


def block_sizes(nodes: int, gpus_per_node: int, multiples: Sequence[int] = (1, 3)) -> tuple[int, ...]:
    """Ascending: `multiples` of powers of two of nodes, and the rest; up to two nodes also divisors of a node's ranks."""
    powers = [2**power for power in range(nodes.bit_length())]
    few = {factor * count for count in powers for factor in multiples if factor * count <= nodes}
    counts = few | {nodes - count for count in few if count < nodes} | {nodes}
    parts = set(divisors(gpus_per_node)) if nodes <= FEW_NODES else set[int]()
    parts |= {gpus_per_node - part for part in parts if part < gpus_per_node}
    return tuple(sorted(parts | {gpus_per_node * count for count in counts}))


def run_sizes(nodes: int, gpus_per_node: int, multiples: Sequence[int] = (1,)) -> tuple[int, ...]:
    """Ranks that a run may have, descending: halvings of all, `multiples` of powers of two of nodes, and powers of two."""
    found = [nodes * gpus_per_node]
    while found[-1] % 2 == 0 and (found[-1] // 2 < gpus_per_node or found[-1] // 2 % gpus_per_node == 0):
        found.append(found[-1] // 2)
    counts = {factor * 2**power for power in range(nodes.bit_length()) for factor in multiples}
    found += [gpus_per_node * count for count in counts if count <= nodes]
    found += [2**power for power in range(gpus_per_node.bit_length())]
    return tuple(sorted(set(found), reverse=True))


def arrangements(sizes_of: Mapping[str, Sequence[int]], num_ranks: int, gpus_per_node: int) -> Iterator[Blocks]:
    """Yield every choice of blocks that covers `num_ranks`, with all positions of parts up to two nodes."""
    roles, every = list(sizes_of), num_ranks <= FEW_NODES * gpus_per_node
    for groups in _partitions(roles):
        common = [sorted(set.intersection(*(set(sizes_of[role]) for role in group)), reverse=True) for group in groups]
        for parents in _forests(len(groups)):
            for sizes in _sized(common, parents, num_ranks):
                placed = _positions(sizes, parents, gpus_per_node)
                for blocks in placed if every else islice(placed, 1):
                    block_of = {role: blocks[number] for number, group in enumerate(groups) for role in group}
                    yield tuple(block_of[role] for role in roles)


def rests(sizes: Iterable[int], total: int) -> tuple[int, ...]:
    """Ascending: the sizes below `total`, and the ranks that each leaves of it."""
    return tuple(sorted({part for size in sizes if size < total for part in (size, total - size)}))


@dataclass(frozen=True)
class Trainers:
    """Blocks of ranks that train. `alone`: only those that no role has."""

    sizes: tuple[int, ...]
    gpus_per_node: int
    alone: bool

    def of(self, place: Blocks) -> Iterator[Block]:
        """Yield blocks that share an end with a role's or the run's, leave no rank before the last block of `place` without a
        role, and are not the actor's.
        """
        *roles, beyond = place
        total, held = beyond.first, max(block.end for block in roles)
        edges = {0, total, *(edge for block in roles for edge in (block.first, block.end))}
        for size in self.sizes:
            for first in sorted({edge - size for edge in edges} | edges):
                block, own = Block(first, size), first == held
                covers = 0 <= first <= held and (first + size == total or first + size <= held == total)
                if covers and block != roles[0] and (own or (not self.alone and self._aligned(block))):
                    yield block

    def _aligned(self, block: Block) -> bool:
        nodes = block.first // self.gpus_per_node, (block.end - 1) // self.gpus_per_node
        return block.first % self.gpus_per_node == 0 if block.size >= self.gpus_per_node else nodes[0] == nodes[1]


def part_starts(whole: Block, size: int, gpus_per_node: int) -> Iterator[int]:
    """Nodes, or within a node multiples of the size from either end."""
    if size >= gpus_per_node:
        yield from range(whole.first, whole.end - size + 1, gpus_per_node)
        return
    for first in range(whole.first, whole.end, gpus_per_node):
        room = min(gpus_per_node, whole.end - first)
        starts = range(0, room - size + 1, size)
        yield from sorted({first + start for start in starts} | {first + room - size - start for start in starts})


def _partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    if not roles:
        yield []
        return
    for groups in _partitions(roles[:-1]):
        yield [*groups, [roles[-1]]]
        for number in range(len(groups)):
            yield [[*group, roles[-1]] if place == number else group for place, group in enumerate(groups)]


def _forests(count: int) -> Iterator[tuple[int | None, ...]]:
    """Yield each group's parent (whose block it has part of), or None."""
    for parents in product((None, *range(count)), repeat=count):
        if all(parent is None or (parent != group and parents[parent] is None) for group, parent in enumerate(parents)):
            yield parents


def _sized(common: Sequence[Sequence[int]], parents: Sequence[int | None], num_ranks: int) -> Iterator[tuple[int, ...]]:
    roots = [group for group, parent in enumerate(parents) if parent is None]
    inner = [(group, parent) for group, parent in enumerate(parents) if parent is not None]
    for chosen in _summing([common[group] for group in roots], num_ranks):
        sizes = dict(zip(roots, chosen, strict=True))
        choices = [[size for size in common[group] if size < sizes[parent]] for group, parent in inner]
        for parts in product(*choices):
            own = {group: part for (group, _), part in zip(inner, parts, strict=True)}
            taken = {parent: sum(own[group] for group, of in inner if of == parent) for _, parent in inner}
            if all(total <= sizes[parent] for parent, total in taken.items()):
                yield tuple((sizes | own)[group] for group in range(len(common)))


def _summing(choices: Sequence[Sequence[int]], total: int) -> Iterator[tuple[int, ...]]:
    if not choices:
        if total == 0:
            yield ()
        return
    for size in choices[0]:
        if size <= total:
            yield from ((size, *rest) for rest in _summing(choices[1:], total - size))


def _positions(sizes: Sequence[int], parents: Sequence[int | None], gpus_per_node: int) -> Iterator[list[Block]]:
    """Yield blocks: undivided ones in a row, largest first, then parts."""
    order = sorted(range(len(sizes)), key=lambda group: (-sizes[group], group))
    roots, inner = [g for g in order if parents[g] is None], [g for g in order if parents[g] is not None]
    whole = [group for group in roots if sizes[group] >= gpus_per_node]
    parts = [group for group in roots if sizes[group] < gpus_per_node]
    rows = (_in_a_row([*whole, *tried], sizes, gpus_per_node) for tried in permutations(parts))
    if (blocks := next((row for row in rows if row is not None), None)) is not None:
        yield from _with_parts(blocks, inner, sizes, parents, gpus_per_node)


def _with_parts(
    blocks: dict[int, Block], inner: Sequence[int], sizes: Sequence[int], parents: Sequence[int | None], gpus_per_node: int
) -> Iterator[list[Block]]:
    if not inner:
        yield [blocks[group] for group in range(len(sizes))]
        return
    part = inner[0]
    parent = parents[part]
    assert parent is not None, "a part has a parent"
    siblings = [blocks[group] for group in blocks if parents[group] == parent]
    for first in part_starts(blocks[parent], sizes[part], gpus_per_node):
        block = Block(first, sizes[part])
        if not any(block.overlaps(other) for other in siblings):
            yield from _with_parts({**blocks, part: block}, inner[1:], sizes, parents, gpus_per_node)


def _in_a_row(groups: Sequence[int], sizes: Sequence[int], gpus_per_node: int) -> dict[int, Block] | None:
    """None if a part of a node would be on two."""
    blocks, first = dict[int, Block](), 0
    for group in groups:
        size = sizes[group]
        if size < gpus_per_node and first % gpus_per_node + size > gpus_per_node:
            return None
        blocks[group] = Block(first, size)
        first += size
    return blocks


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class Times(NamedTuple):
    """Nanoseconds of a role's phases, numbers or arrays."""

    serving: Any
    update: Any = 0
    weights: Any = 0

    @property
    def total(self) -> Any:
        return self.serving + self.update + self.weights


@dataclass(frozen=True)
class Mode:
    """`streams`: scoring overlaps decoding, except its `last_share`; `hides_critic`: the critic's update overlaps, too.

    `waits`: with continuous generation, the share of decoding that waits for the weights of the batch before; `pauses`: decoding
    pauses for their way.
    """

    streams: bool
    hides_critic: bool
    last_share: float = 1.0
    waits: Fraction | None = None
    pauses: bool = False


@dataclass(frozen=True)
class StepRule:
    """Time of a step from its roles' phases (the actor first); it never falls if a phase takes longer.

    With TRAINERS, a step ends only after all updates, whose success all ranks agree on.
    """

    roles: tuple[str, ...]
    blocks: Blocks
    mode: Mode

    def step_ns(self, times: Sequence[Times]) -> Any:
        actor, mode = times[0], self.mode
        if not mode.streams and (mode.waits is None or len(self._scorers)):
            return actor.serving + self._scoring_ns(times, 1.0) + self._updates_ns(times)
        if mode.waits is not None:
            return self._beside_ns(times, mode.waits)
        hidden = mode.hides_critic and not self._apart
        after = actor.update + actor.weights if hidden else self._updates_ns(times)
        path = actor.serving + self._scoring_ns(times, mode.last_share) + after
        return _largest(path, *(sum(times[other].total for other in others) for others in self._over))

    def _beside_ns(self, times: Sequence[Times], waits: Fraction) -> Any:
        """Time between two installations: decoding, or training and the weights' way, while which all but a share is decoded."""
        weights, served = times[0].weights, [sum(times[other].serving for other in others) for others in self._over[:-1]]
        critic = sum(times[role].update + times[role].weights for role in self._scorers)
        decoding, last = _largest(*served), self._scoring_ns(times, self.mode.last_share) if waits else 0
        training = times[-1].update + weights + last
        waited = decoding * waits.numerator // waits.denominator
        return critic + _largest(decoding + (weights if self.mode.pauses else 0), waited + training)

    def _scoring_ns(self, times: Sequence[Times], share: float) -> Any:
        """Time until all roles have scored; each starts after the earlier ones that share ranks with it."""
        ends: list[Any] = []
        for role in self._scorers:
            start, serving = (
                _largest(0, *(ends[other - 1] for other in self._overlaps[role] if 0 < other < role)),
                times[role].serving,
            )
            if share != 1.0:
                part = serving * share
                serving = np.ceil(part).astype(np.int64) if isinstance(part, np.ndarray) else ceil(part)
            ends.append(start + serving)
        return _largest(0, *ends)

    def _updates_ns(self, times: Sequence[Times]) -> Any:
        trainers = len(self.blocks) - 1 if self._apart else 0
        alone = times[trainers].update + times[0].weights
        others = [
            times[role].update + times[role].weights + (alone if role in self._overlaps[trainers] else 0)
            for role in self._scorers
        ]
        return _largest(alone, *others)

    @property
    def _apart(self) -> bool:
        return self.roles[-1] == TRAINERS

    @property
    def _scorers(self) -> range:
        return range(1, len(self.roles) - self._apart)

    @cached_property
    def _overlaps(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(number for number, other in enumerate(self.blocks) if block.overlaps(other)) for block in self.blocks
        )

    @cached_property
    def _over(self) -> tuple[tuple[int, ...], ...]:
        """For each role, the roles whose blocks contain all of its ranks."""
        return tuple(tuple(number for number, other in enumerate(self.blocks) if other.contains(block)) for block in self.blocks)


def _largest(*values: Any) -> Any:
    if any(isinstance(value, np.ndarray) for value in values):
        return reduce(np.maximum, values)
    return max(values)
