"""Where roles live: which sets of ranks they have, up to the numbering of nodes.

A set is a part of a node, or whole nodes.  Two roles have the same set, sets apart, or one has a part of the other's; a part has
no parts of its own.  Nodes are alike, and so are the ranks of one: of all ways to number them, one stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product

from oppo_megatron.layout.layouts import divisors

FEW_NODES = 2
"""Up to so many nodes, roles may have parts of them, and parts of sets lie at any place."""


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

    Each way comes once.  Where in a set its parts lie counts, for stages hold more or less: on up to two nodes parts are put at
    every place, on more at the first that is free.
    """
    roles, few = list(sizes_of), num_ranks <= FEW_NODES * gpus_per_node
    for groups in _partitions(len(roles)):
        numbers = _numbers(groups, len(roles))
        common = [
            sorted(set.intersection(*(set(sizes_of[roles[role]]) for role in group)), reverse=True) for group in groups
        ]
        for parents in _forests(len(groups)):
            for sizes in _sized(common, parents, num_ranks):
                every = _place(sizes, parents, gpus_per_node)
                for placed in every if few else islice(every, 1):
                    yield tuple(placed[number] for number in numbers)


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


def _place(sizes: Sequence[int], parents: Sequence[int | None], gpus_per_node: int) -> Iterator[list[Home]]:
    """Homes of the groups: roots without gaps, large ones first, parts at each of their places; none where roots leave gaps."""
    roots = sorted((g for g, parent in enumerate(parents) if parent is None), key=lambda g: (-sizes[g], g))
    whole = [group for group in roots if sizes[group] >= gpus_per_node]
    parts = [group for group in roots if sizes[group] < gpus_per_node]
    rows = (_in_a_row([*whole, *tried], sizes, gpus_per_node) for tried in permutations(parts))
    homes = next((row for row in rows if row is not None), None)
    if homes is None:
        return
    inner = sorted((g for g, parent in enumerate(parents) if parent is not None), key=lambda g: (-sizes[g], g))
    yield from _put_parts(homes, inner, sizes, parents, gpus_per_node)


def _put_parts(
    homes: dict[int, Home],
    inner: Sequence[int],
    sizes: Sequence[int],
    parents: Sequence[int | None],
    gpus_per_node: int,
) -> Iterator[list[Home]]:
    """With the parts `inner` at every place that their sets have for them, one after the other."""
    if not inner:
        yield [homes[group] for group in range(len(sizes))]
        return
    part = inner[0]
    parent = parents[part]
    assert parent is not None, "a part is part of something"
    siblings = [homes[group] for group in homes if parents[group] == parent]
    for first in part_places(homes[parent], sizes[part], gpus_per_node):
        home = Home(first, sizes[part])
        if not any(home.meets(other) for other in siblings):
            yield from _put_parts({**homes, part: home}, inner[1:], sizes, parents, gpus_per_node)


def part_places(whole: Home, size: int, gpus_per_node: int) -> Iterator[int]:
    """Where a part may begin: at nodes; within one, at multiples of its size from either end."""
    if size >= gpus_per_node:
        yield from range(whole.first, whole.end - size + 1, gpus_per_node)
        return
    for first in range(whole.first, whole.end, gpus_per_node):
        room = min(gpus_per_node, whole.end - first)
        starts = range(0, room - size + 1, size)
        yield from sorted({first + start for start in starts} | {first + room - size - start for start in starts})


def _in_a_row(groups: Sequence[int], sizes: Sequence[int], gpus_per_node: int) -> dict[int, Home] | None:
    homes, first = dict[int, Home](), 0
    for group in groups:
        size = sizes[group]
        if size < gpus_per_node and first % gpus_per_node + size > gpus_per_node:
            return None
        homes[group] = Home(first, size)
        first += size
    return homes
