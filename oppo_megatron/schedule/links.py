"""The directed links of a site, and the waves in which they are first used.

Two streams of messages between the same ranks (decode and prefill, say) must not wait for one another, so each has a link of
its own, with a process group of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site

Link = tuple[int, int, str, Payload | None]
"""(sender, receiver, role, payload)"""


def link_of(action: Action) -> Link:
    """The directed link of a send or a receive."""
    peer = -1 if action.peer is None else action.peer
    ends = (action.rank, peer) if action.op is Op.SEND else (peer, action.rank)
    return (*ends, action.role, action.payload)


def links_of(site: Site) -> Iterator[Link]:
    """Every link that a schedule of the site may send over, in an order that all ranks share."""
    for role, placement in site.placements.items():
        for replica in range(placement.dp):
            for shard in range(placement.tp):
                stages = [placement.rank(replica, stage, shard) for stage in range(placement.pp)]
                for source, destination in zip(stages, stages[1:], strict=False):
                    yield source, destination, role, Payload.HIDDEN
                if role == "actor":
                    for destination in stages[:-1]:
                        yield stages[-1], destination, role, Payload.TOKENS
    for listener in site.listeners:
        yield site.source, listener, "actor", Payload.CHUNK


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
