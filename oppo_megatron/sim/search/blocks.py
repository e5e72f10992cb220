"""Blocks of ranks for roles, up to renumbering: part of a node or whole nodes. Roles share a block, have disjoint ones, or
one has part of another's, not divided further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product

from oppo_megatron.layout.layouts import divisors

FEW_NODES = 2
"""Up to this number, roles may have parts of a node, at several places."""
MANY_NODES = 32
"""Above it, blocks are powers of two of nodes, or the rest of all."""


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


def block_sizes(nodes: int, gpus_per_node: int) -> tuple[int, ...]:
    """Block sizes in ranks, ascending: 1 or 3 times powers of two of nodes, and the rest of all; up to two nodes also
    divisors of a node's ranks, and the rest.
    """
    powers = [2**power for power in range(nodes.bit_length())]
    multiples = (1,) if nodes > MANY_NODES else (1, 3)
    few = {factor * count for count in powers for factor in multiples if factor * count <= nodes}
    counts = few | {nodes - count for count in few if count < nodes} | {nodes}
    parts = set(divisors(gpus_per_node)) if nodes <= FEW_NODES else set[int]()
    parts |= {gpus_per_node - part for part in parts if part < gpus_per_node}
    return tuple(sorted(parts | {gpus_per_node * count for count in counts}))


def run_sizes(nodes: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of ranks that a run may have, descending: halvings of all, and powers of two of nodes and ranks."""
    found = [nodes * gpus_per_node]
    while found[-1] % 2 == 0 and (found[-1] // 2 < gpus_per_node or found[-1] // 2 % gpus_per_node == 0):
        found.append(found[-1] // 2)
    found += [gpus_per_node * 2**power for power in range(nodes.bit_length())]
    found += [2**power for power in range(gpus_per_node.bit_length())]
    return tuple(sorted(set(found), reverse=True))


def arrangements(sizes_of: Mapping[str, Sequence[int]], num_ranks: int, gpus_per_node: int) -> Iterator[Blocks]:
    """Yield every choice of blocks that covers `num_ranks`, with all positions of parts up to two nodes, because memory
    differs.
    """
    roles, every = list(sizes_of), num_ranks <= FEW_NODES * gpus_per_node
    for groups in _partitions(roles):
        common = [sorted(set.intersection(*(set(sizes_of[role]) for role in group)), reverse=True) for group in groups]
        for parents in _forests(len(groups)):
            for sizes in _sized(common, parents, num_ranks):
                placed = _positions(sizes, parents, gpus_per_node)
                for blocks in placed if every else islice(placed, 1):
                    block_of = {role: blocks[number] for number, group in enumerate(groups) for role in group}
                    yield tuple(block_of[role] for role in roles)


def part_starts(whole: Block, size: int, gpus_per_node: int) -> Iterator[int]:
    """Starts of a part: nodes, or within a node multiples of its size from either end."""
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
    """Yield for each group its parent (whose block it has part of), or None."""
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
    blocks: dict[int, Block],
    inner: Sequence[int],
    sizes: Sequence[int],
    parents: Sequence[int | None],
    gpus_per_node: int,
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
