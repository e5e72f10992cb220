"""The links that a schedule may send over, the groups of ranks that carry them, and the waves in which they are first used.

A link is directed: (source, destination, role, payload).  Two streams of messages between the same ranks (decode and prefill,
say) must not wait for one another, so no two links of the same ranks share a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site

Link = tuple[int, int, str, Payload | None]
"""(sender, receiver, role, payload)"""


def link_of(action: Action) -> Link:
    """The directed link of a send or a receive."""
    peer = -1 if action.peer is None else action.peer
    ends = (action.rank, peer) if action.op is Op.SEND else (peer, action.rank)
    return (*ends, action.role, action.payload)


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
    for rank, listeners in site.feeds.items():
        yield _lane((rank, *listeners), "actor", Payload.CHUNK, [(rank, listener) for listener in listeners])


def _lane(ranks: tuple[int, ...], role: str, payload: Payload, ends: list[tuple[int, int]]) -> Lane:
    return Lane(f"{role}.{payload.value}", ranks, tuple((*both, role, payload) for both in ends))


def links_of(site: Site) -> Iterator[Link]:
    """Every link that a schedule of the site may send over, in an order that all ranks share."""
    return (link for lane in lanes_of(site) for link in lane.links)


def in_waves(links: Sequence[Link]) -> list[tuple[Link, ...]]:
    """The links in waves, in each of which a rank has at most one.

    A rank that goes through its own links wave by wave may wait at each until the other end has come, and no circle of ranks
    waits: of the links that are waited at, those of the earliest wave have both ends there.  A link is in the first wave in
    which neither end is engaged, so if no rank has more than n links there are at most 2 n - 1 waves, whatever the number of
    ranks.
    """
    engaged: dict[int, int] = defaultdict(int)  # by rank: its waves, as bits
    waves: list[list[Link]] = []
    for link in links:
        taken = engaged[link[0]] | engaged[link[1]]
        wave = ((taken + 1) & ~taken).bit_length() - 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(link)
        for end in link[:2]:
            engaged[end] |= 1 << wave
    return [tuple(wave) for wave in waves]
