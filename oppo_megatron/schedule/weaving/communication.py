"""The pass that adds messages to a schedule of compute actions.

A send stands directly behind the action that makes its content and never blocks; a receive directly before the action that
needs it.
So the messages of a link are asked for in the order in which they are sent, and the lists stay free of deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Round, Site


def add_communication(schedule: Schedule, round: Round, site: Site) -> Schedule:
    """The schedule with its messages.

    Activations go from each stage to the next.  Drawn tokens go from the last stage to all others of the replica: each
    takes them before the sequences' next decode micro-step, those of the last step at its end.  When a rank has done
    its part, the actor's replicas gather their chunks, and each rank without the actor is sent the whole chunk by a rank that
    knows it (`Site.feeds`).
    """
    lists = {rank: messages_of(rank, schedule, round, site) for rank in site.ranks}
    return Schedule({rank: own for rank, own in lists.items() if own})


def messages_of(rank: int, schedule: Schedule, round: Round, site: Site) -> tuple[Action, ...]:
    """The rank's list with its messages, which follow from its own list alone."""
    placements, own = site.placements, schedule.of(rank)
    coords_by_role = {role: placement.coords(rank) for role, placement in placements.items()}
    return (
        *(m for action in own for m in with_messages(action, placements[action.role], coords_by_role[action.role])),
        *_last_tokens(own, placements["actor"]),
        *(_spread(rank, round.index, site) if round.decodes else ()),
    )


def with_messages(action: Action, placement: RolePlacement, coords: RankCoordinates | None) -> Iterator[Action]:
    """An action between the receives before it and the sends behind it; `coords` are its rank's."""
    assert coords is not None, f"rank {action.rank} has no part of {action.role}"
    replica, stage, shard = coords
    last = placement.pp - 1
    if action.op in (Op.DECODE, Op.PREFILL):
        if action.op is Op.DECODE and action.step and stage < last:
            yield _message(action, Op.RECV, Payload.TOKENS, placement.rank(replica, last, shard), action.step - 1)
        if stage > 0:
            yield _message(action, Op.RECV, Payload.HIDDEN, placement.rank(replica, stage - 1, shard), action.step)
    yield action
    if action.op in (Op.DECODE, Op.PREFILL) and stage < last:
        yield _message(action, Op.SEND, Payload.HIDDEN, placement.rank(replica, stage + 1, shard), action.step)
    if action.op is Op.SAMPLE:
        for other in range(last):
            yield _message(action, Op.SEND, Payload.TOKENS, placement.rank(replica, other, shard), action.step)


def _last_tokens(actions: tuple[Action, ...], actor: RolePlacement) -> Iterator[Action]:
    """Receives of the tokens that no decode micro-step of this rank comes after."""
    final: dict[int, Action] = {}
    for action in actions:
        if action.op is Op.DECODE:
            final[action.micro_batch] = action
    for action in final.values():
        coords = actor.coords(action.rank)
        assert coords is not None
        if coords.stage < actor.pp - 1:
            source = actor.rank(coords.replica, actor.pp - 1, coords.shard)
            yield _message(action, Op.RECV, Payload.TOKENS, source, action.step)


def _spread(rank: int, chunk: int, site: Site) -> Iterator[Action]:
    """The end of a rank's list where a chunk was decoded: how it becomes known outside the replica that decoded it."""
    actor = site.placements["actor"]
    decoding = actor.coords(rank) is not None
    if actor.dp > 1 and decoding:
        yield Action(rank, Op.GATHER, "actor", 0, chunk)
    if not decoding:
        yield Action(rank, Op.RECV, "actor", 0, chunk, payload=Payload.CHUNK, peer=site.fed_by[rank])
    for listener in site.feeds.get(rank, ()):
        yield Action(rank, Op.SEND, "actor", 0, chunk, payload=Payload.CHUNK, peer=listener)


def _message(action: Action, op: Op, payload: Payload, peer: int, step: int | None) -> Action:
    return Action(action.rank, op, action.role, action.micro_batch, action.chunk, step, payload, peer)
