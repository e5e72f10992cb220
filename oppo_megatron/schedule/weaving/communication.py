from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Round, Site


def add_communication(schedule: Schedule, round: Round, site: Site) -> Schedule:
    """Sends come directly after their source, receives directly before their use, the gather and the whole chunk last."""
    lists = {rank: messages_of(rank, schedule, round, site) for rank in site.ranks}
    return Schedule({rank: own for rank, own in lists.items() if own})


def messages_of(
    rank: int, schedule: Schedule, round: Round, site: Site, known: dict[Action, tuple[Action, ...]] | None = None
) -> tuple[Action, ...]:
    """Return the rank's list with its messages. `known` caches each action's messages."""
    placements, own = site.placements, schedule.of(rank)
    coords_by_role = {role: placement.coords(rank) for role, placement in placements.items()}
    known = {} if known is None else known
    actions: list[Action] = []
    for action in own:
        if action not in known:
            coords = coords_by_role.get(action.role)
            known[action] = (action,) if coords is None else tuple(with_messages(action, placements[action.role], coords))
        actions += known[action]
    actor, coords = placements["actor"], coords_by_role["actor"]
    if coords is not None and coords.stage < actor.pp - 1:
        source = actor.rank(coords.replica, actor.pp - 1, coords.shard)
        last = {action.micro_batch: action for action in own if action.op is Op.DECODE}
        actions += [_message(action, Op.RECV, Payload.TOKENS, source, action.step) for action in last.values()]
    if round.decodes:
        chunk = "actor", 0, round.index
        if coords is None:
            actions.append(Action(rank, Op.RECV, *chunk, payload=Payload.CHUNK, peer=site.fed_by[rank]))
        elif actor.dp > 1:
            actions.append(Action(rank, Op.GATHER, *chunk))
        actions += [Action(rank, Op.SEND, *chunk, payload=Payload.CHUNK, peer=other) for other in site.feeds.get(rank, ())]
    return tuple(actions)


def with_messages(action: Action, placement: RolePlacement, coords: RankCoordinates) -> Iterator[Action]:
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


def _message(action: Action, op: Op, payload: Payload, peer: int, step: int | None) -> Action:
    return Action(action.rank, op, action.role, action.micro_batch, action.chunk, step, payload, peer)
