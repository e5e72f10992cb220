"""Links and process groups. Directed links share no group, so their messages never wait for each other.

gloo accepts every message at once. Over NCCL, both ends wait in a communicator's first use, and a send ends when received;
without tags, each directed link has a communicator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS
from oppo_megatron.layout.placements import ALONE, GroupName, RolePlacement, group_name, model_groups, scorers_leader
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site

Link = tuple[int, int, str, Payload | None]
"""(sender, receiver, role, payload)"""


def link_of(action: Action) -> Link:
    peer = -1 if action.peer is None else action.peer
    ends = (action.rank, peer) if action.op is Op.SEND else (peer, action.rank)
    return (*ends, action.role, action.payload)


class Lane(NamedTuple):
    """The links of one process group: one payload of a pipeline, or the chunks from one rank."""

    label: str
    ranks: tuple[int, ...]
    links: tuple[Link, ...]


def lanes_of(site: Site) -> Iterator[Lane]:
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


def in_waves(links: Sequence[Link]) -> list[tuple[Link, ...]]:
    """Divide links into waves with one per rank at most, whose first use cannot deadlock."""
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


WEIGHTS, READY = "actor.weights", "actor.ready"
"""Groups of ranks that decode or train the actor, if those differ: for its weights, and, on CPUs, for news of them."""
JUDGING, VERDICTS = "judging", "verdicts"
"""Groups, on CPUs, of the ranks that take part in rounds, and of their leader and the ranks that only train."""


def run_groups(
    placements: Mapping[str, RolePlacement], trained: Mapping[str, RolePlacement], *, relays: bool = False
) -> list[GroupName]:
    """List a run's groups in creation order, without the world's.  `relays`: of verdicts to ranks that only train."""
    site = Site.of(placements, trained)
    world = tuple(range(1 + max(site.ranks)))
    found = dict.fromkeys(group_name(ALONE, (rank,)) for rank in world)
    for role, placement in [*placements.items(), *((r, p) for r, p in trained.items() if p != placements.get(r))]:
        sizes = placement.cp, placement.ep
        found |= dict.fromkeys(name for _, name in model_groups(placement.ranks, placement.tp, placement.pp, role, *sizes))
    if "actor" in trained and (moved := moving(placements["actor"], trained["actor"])):
        found |= dict.fromkeys((GroupName(WEIGHTS, moved), GroupName(READY, moved)))
    if relays:
        found |= dict.fromkeys(relaying(site))
    lanes = [GroupName(lane.label, lane.ranks) for lane in lanes_of(site)]
    return [*found, *lanes, GroupName("checkpoints", world)]


def relaying(site: Site) -> list[GroupName]:
    """Name the groups of JUDGING and VERDICTS."""
    inside, leader = tuple(rank for rank in site.ranks if rank not in site.followers), scorers_leader(site.placements)
    return [GroupName(JUDGING, inside), GroupName(VERDICTS, (leader, *site.followers))]


def moving(serving: RolePlacement, training: RolePlacement) -> tuple[int, ...]:
    """Ranks among which weights move if a role is trained on other ranks than it is used on; else none."""
    union = tuple(sorted({*serving.ranks, *training.ranks}))
    return () if sorted(serving.ranks) == sorted(training.ranks) else union


def groups_by_rank(groups: Iterable[GroupName]) -> Counter[int]:
    counts = Counter(rank for group in groups for rank in group.ranks)
    return Counter({rank: 1 + count for rank, count in counts.items()})


def most_streams(site: Site) -> int:
    """Most CUDA streams of any rank: one per role, link and other group."""
    counts = Counter(rank for placement in site.placements.values() for rank in placement.ranks)
    lanes = list(lanes_of(site))
    counts.update(rank for lane in lanes for link in lane.links for rank in link[:2])
    names = {GroupName(lane.label, lane.ranks) for lane in lanes}
    groups = [group for group in run_groups(site.placements, {}) if len(group.ranks) > 1 and group not in names]
    return (counts + groups_by_rank(groups)).most_common(1)[0][1]


def calls_of(groups: Iterable[GroupName]) -> int:
    """Count a rank's `new_group` calls: one per group of several ranks, and one for itself."""
    return 1 + sum(group.label != ALONE for group in groups)


@dataclass(frozen=True)
class Transport:
    """`made`: communicators exist before the round. `in_flight`: most unreceived messages of a link (missing: no limit)."""

    name: str
    made: bool = True
    in_flight: Mapping[Payload | None, int] = field(default_factory=dict)
    remedy: str = ""

    @property
    def holds(self) -> bool:
        return not self.made or bool(self.in_flight)

    @property
    def free(self) -> Transport:
        return replace(self, made=True, in_flight={})


GLOO = Transport("gloo")
NCCL = Transport("nccl")
COLD = Transport("nccl-cold", made=False, remedy="make the communicators before the round")
ONE_QUEUE = Transport(
    "nccl-one-queue",
    in_flight={Payload.HIDDEN: 1},
    remedy=f"set {CONNECTIONS}={MOST_CONNECTIONS}, or take overlap.schedule=intra",
)
TRANSPORTS: Mapping[str, Transport] = {each.name: each for each in (GLOO, NCCL, COLD, ONE_QUEUE)}
"""`nccl`: every communicator has its own CUDA stream. `nccl-one-queue`: the check assumes that all streams share a hardware
queue, because CUDA does not say which do; a waiting hidden state then blocks later work (NCCL buffers tokens and chunks).
`nccl-cold`: communicators are made during the round.
"""


def transport_of(device: str, environment: Mapping[str, str], streams: int) -> Transport:
    """`device` is "cpu" or "cuda"; `streams`: most CUDA streams per rank."""
    if device == "cpu":
        return GLOO
    value = environment.get(CONNECTIONS, "").strip() or str(MOST_CONNECTIONS)
    # CUDA and torch may read other values differently; 1 queue is the strictest check.
    queues = min(int(value), MOST_CONNECTIONS) if value.isdecimal() else 1
    return NCCL if streams <= queues else ONE_QUEUE
