"""Where roles live: which sets of ranks they have, up to the numbering of nodes.

A set is a part of a node, or whole nodes.  Two roles have the same set, sets apart, or one has a part of the other's; a part has
no parts of its own.  Nodes are alike, and so are the ranks of one: of all ways to number them, one stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from oppo_megatron.layout.layouts import divisors

FEW_NODES = 2
"""Up to so many nodes, roles may have parts of them."""


@dataclass(frozen=True)
class Home:
    """Ranks `first` to `first + size - 1`."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size

    def meets(self, other: Home) -> bool:
        return self.first < other.end and other.first < self.end

    def holds(self, other: Home) -> bool:
        return self.first <= other.first and other.end <= self.end

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.end))


Homes = tuple[Home, ...]
"""The home of each role, in the order of roles."""


def set_sizes(nodes: int, gpus_per_node: int) -> tuple[int, ...]:
    """Sizes of sets, ascending.

    Of nodes: powers of two, three times these, and what such numbers leave of all.  With at most two nodes also of parts of one:
    divisors of its ranks, and all but as many.
    """
    powers = [2**power for power in range(nodes.bit_length())]
    few = {count for power in powers for count in (power, 3 * power) if count <= nodes}
    counts = few | {nodes - count for count in few if count < nodes} | {nodes}
    parts = set(divisors(gpus_per_node)) if nodes <= FEW_NODES else set[int]()
    parts |= {gpus_per_node - part for part in parts if part < gpus_per_node}
    return tuple(sorted(parts | {gpus_per_node * count for count in counts}))


def totals(nodes: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of ranks that a run may take: all, half of them and so on, of whole nodes or of a part of one."""
    found = [nodes * gpus_per_node]
    while found[-1] % 2 == 0 and (found[-1] // 2 < gpus_per_node or found[-1] // 2 % gpus_per_node == 0):
        found.append(found[-1] // 2)
    return tuple(found)


def arrangements(sizes_of: Mapping[str, Sequence[int]], num_ranks: int, gpus_per_node: int) -> Iterator[Homes]:
    """All homes of the roles on so many ranks, each of which has a role; sets have one of the sizes that `sizes_of` admits.

    Each way comes once.
    """
    roles = list(sizes_of)
    for groups in _partitions(len(roles)):
        common = [
            sorted(set.intersection(*(set(sizes_of[roles[role]]) for role in group)), reverse=True) for group in groups
        ]
        for parents in _forests(len(groups)):
            for sizes in _sized(common, parents, num_ranks):
                placed = _place(sizes, parents, gpus_per_node)
                if placed is not None:
                    yield tuple(placed[number] for number in _numbers(groups, len(roles)))


def _numbers(groups: Sequence[Sequence[int]], count: int) -> list[int]:
    """The group of each role."""
    return [next(number for number, group in enumerate(groups) if role in group) for role in range(count)]


def _partitions(count: int) -> Iterator[list[list[int]]]:
    """Every way to put so many roles into groups."""
    if count == 0:
        yield []
        return
    last = count - 1
    for groups in _partitions(last):
        yield [*groups, [last]]
        for number in range(len(groups)):
            yield [[*group, last] if place == number else group for place, group in enumerate(groups)]


def _forests(count: int) -> Iterator[tuple[int | None, ...]]:
    """For each group the one of which it has a part, or None."""
    for parents in product((None, *range(count)), repeat=count):
        if all(parent is None or (parent != group and parents[parent] is None) for group, parent in enumerate(parents)):
            yield parents


def _sized(common: Sequence[Sequence[int]], parents: Sequence[int | None], num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Sizes of the groups with which roots take all ranks, and parts fit into what they are parts of."""
    order = sorted(range(len(common)), key=lambda group: parents[group] is not None)
    sizes = [0] * len(common)
    left = [0] * len(common)

    def settle(place: int, free: int) -> Iterator[tuple[int, ...]]:
        if place == len(order):
            if free == 0:
                yield tuple(sizes)
            return
        group = order[place]
        parent = parents[group]
        room = free if parent is None else left[parent]
        for size in common[group]:
            if size > room or (parent is not None and size >= sizes[parent]):
                continue
            sizes[group] = left[group] = size
            if parent is None:
                yield from settle(place + 1, free - size)
            else:
                left[parent] -= size
                yield from settle(place + 1, free)
                left[parent] += size

    yield from settle(0, num_ranks)


def _place(sizes: Sequence[int], parents: Sequence[int | None], gpus_per_node: int) -> list[Home] | None:
    """A home for each group: roots without gaps, large ones first; None where parts of nodes leave some."""
    roots = sorted((g for g, parent in enumerate(parents) if parent is None), key=lambda g: (-sizes[g], g))
    whole = [group for group in roots if sizes[group] >= gpus_per_node]
    parts = [group for group in roots if sizes[group] < gpus_per_node]
    for tried in permutations(parts):
        homes = _in_a_row([*whole, *tried], sizes, gpus_per_node)
        if homes is not None:
            break
    else:
        return None
    for parent in roots:
        children = sorted((g for g, its in enumerate(parents) if its == parent), key=lambda g: (-sizes[g], g))
        if not _put_into(homes, parent, children, sizes, gpus_per_node):
            return None
    return [homes[group] for group in range(len(sizes))]


def _in_a_row(groups: Sequence[int], sizes: Sequence[int], gpus_per_node: int) -> dict[int, Home] | None:
    homes, first = dict[int, Home](), 0
    for group in groups:
        size = sizes[group]
        if size < gpus_per_node and first % gpus_per_node + size > gpus_per_node:
            return None
        homes[group] = Home(first, size)
        first += size
    return homes


def _put_into(
    homes: dict[int, Home], parent: int, children: Sequence[int], sizes: Sequence[int], gpus_per_node: int
) -> bool:
    """Put parts, largest first, into the first node that has room; False where none has."""
    inside = homes[parent]
    free = [min(gpus_per_node, inside.end - first) for first in range(inside.first, inside.end, gpus_per_node)]
    for child in children:
        size = sizes[child]
        count = max(1, size // gpus_per_node)
        need = min(size, gpus_per_node)
        start = next(
            (n for n in range(len(free) - count + 1) if all(room >= need for room in free[n : n + count])), None
        )
        if start is None:
            return False
        in_node = min(gpus_per_node, inside.size) - free[start]
        homes[child] = Home(inside.first + start * gpus_per_node + in_node, size)
        for node in range(start, start + count):
            free[node] -= need
    return True
