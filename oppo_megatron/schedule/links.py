"""The links that a schedule may send over, and the groups of ranks that carry them.

A link is directed: (source, destination, role, payload).  Two streams of messages between the same ranks (decode and prefill,
say) must not wait for one another, so no two links of the same ranks share a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oppo_megatron.schedule.actions import Payload
from oppo_megatron.schedule.rounds import Site

Link = tuple[int, int, str, Payload]


class Lane(NamedTuple):
    """A group of ranks, and the links that go over it: those of a payload along the pipeline of one tensor shard, or from one
    rank that sends chunks."""

    label: str
    ranks: tuple[int, ...]
    links: tuple[Link, ...]


def lanes_of(site: Site) -> Iterator[Lane]:
    """All lanes, in the order in which their groups are made."""
    for role, placement in site.placements.items():
        if placement.pp == 1:
            continue
        for replica in range(placement.dp):
            for shard in range(placement.tp):
                stages = tuple(placement.rank(replica, stage, shard) for stage in range(placement.pp))
                neighbours = zip(stages, stages[1:], strict=False)
                yield _lane(stages, role, Payload.HIDDEN, list(neighbours))
                if role == "actor":
                    yield _lane(stages, role, Payload.TOKENS, [(stages[-1], other) for other in stages[:-1]])
    if site.listeners:
        ends = [(site.source, listener) for listener in site.listeners]
        yield _lane((site.source, *site.listeners), "actor", Payload.CHUNK, ends)


def _lane(ranks: tuple[int, ...], role: str, payload: Payload, ends: list[tuple[int, int]]) -> Lane:
    return Lane(f"{role}.{payload.value}", ranks, tuple((*both, role, payload) for both in ends))
