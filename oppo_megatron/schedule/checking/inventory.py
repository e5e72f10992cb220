"""All actions that a round requires of each rank, in no order: the content of a complete schedule."""

from __future__ import annotations

from collections.abc import Iterator

from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Round, Site


def required_actions(round_: Round, site: Site) -> Iterator[Action]:
    """Each exactly once.  Raises ScheduleError where round and site have not the same roles and replicas."""
    for role, replicas in (("actor", round_.decode), *round_.prefill.items()):
        dp = site.placements[role].dp if role in site.placements else 0
        if len(replicas) > dp:
            raise ScheduleError(
                f"the round has work for {len(replicas)} replicas of the {role} role, which has {dp}; plan the round for "
                "the same layout"
            )
    for role, replicas in round_.prefill.items():
        for replica, batches in enumerate(replicas):
            for micro_batch in range(len(batches)):
                yield from _prefill(round_, site.placements[role], role, replica, micro_batch)
    for replica, batches in enumerate(round_.decode):
        for micro_batch in range(len(batches)):
            for step in range(round_.steps):
                yield from _decode(round_, site.placements["actor"], replica, micro_batch, step)
    if round_.decodes:
        yield from _spread(round_, site)


def _prefill(round_: Round, placement: RolePlacement, role: str, replica: int, micro_batch: int) -> Iterator[Action]:
    chunk = round_.index if role == "actor" else round_.index - 1
    for stage in range(placement.pp):
        for rank in placement.stage_ranks(replica, stage):
            yield Action(rank, Op.PREFILL, role, micro_batch, chunk)
            if role != "actor" and stage == placement.pp - 1:
                yield Action(rank, Op.SCORE, role, micro_batch, chunk)
    yield from _hidden(placement, role, replica, micro_batch, chunk, None)


def _decode(round_: Round, placement: RolePlacement, replica: int, micro_batch: int, step: int) -> Iterator[Action]:
    last, key = placement.pp - 1, ("actor", micro_batch, round_.index, step)
    for stage in range(placement.pp):
        for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
            yield Action(rank, Op.DECODE, *key)
            drawn_by = placement.rank(replica, last, shard)
            if stage == last:
                yield Action(rank, Op.SAMPLE, *key)
            else:
                yield Action(drawn_by, Op.SEND, *key, Payload.TOKENS, rank)
                yield Action(rank, Op.RECV, *key, Payload.TOKENS, drawn_by)
    yield from _hidden(placement, "actor", replica, micro_batch, round_.index, step)


def _hidden(
    placement: RolePlacement, role: str, replica: int, micro_batch: int, chunk: int, step: int | None
) -> Iterator[Action]:
    for stage in range(placement.pp - 1):
        for here, there in zip(
            placement.stage_ranks(replica, stage), placement.stage_ranks(replica, stage + 1), strict=True
        ):
            yield Action(here, Op.SEND, role, micro_batch, chunk, step, Payload.HIDDEN, there)
            yield Action(there, Op.RECV, role, micro_batch, chunk, step, Payload.HIDDEN, here)


def _spread(round_: Round, site: Site) -> Iterator[Action]:
    """The chunk's way to every rank: among the actor's replicas, then to the listeners."""
    placement = site.placements["actor"]
    if placement.dp > 1:
        for rank in placement.ranks:
            yield Action(rank, Op.GATHER, "actor", 0, round_.index)
    for listener, sender in site.fed_by.items():
        yield Action(sender, Op.SEND, "actor", 0, round_.index, None, Payload.CHUNK, listener)
        yield Action(listener, Op.RECV, "actor", 0, round_.index, None, Payload.CHUNK, sender)
