"""The communication pass: the places of messages; which ones there are is for the checker to say."""

from __future__ import annotations

import pytest

from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import LAYOUTS, colocated, disaggregated, make_round

STEPS, MICRO_BATCHES, PREFILLS, PROMPTS = 3, 2, 2, 1


def with_messages(site: Site, name: str) -> tuple[Round, Schedule, Schedule]:
    round_ = make_round(site, STEPS, MICRO_BATCHES, PREFILLS, PROMPTS)
    compute = GENERATORS[name](round_, site, Costs())
    return round_, compute, add_communication(compute, round_, site)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_of_messages(layout: tuple[int, int, int], name: str) -> None:
    """Hidden state: received directly before its use, sent directly after it.  Tokens: before the next step, or last."""
    site = colocated(layout)
    _, compute, schedule = with_messages(site, name)
    for rank, own in schedule.actions.items():
        assert tuple(a for a in own if a.payload is None and a.op is not Op.GATHER) == compute.of(rank)
        for at, action in enumerate(own):
            same = (action.role, action.micro_batch, action.step)
            if action.payload is Payload.HIDDEN:
                other = own[at + 1] if action.op is Op.RECV else own[at - 1]
                assert other.op in (Op.DECODE, Op.PREFILL)
                assert (other.role, other.micro_batch, other.step) == same
            if action.payload is Payload.TOKENS and action.op is Op.RECV:
                assert _after_tokens(own[at + 1 :], action)


def _after_tokens(rest: tuple[Action, ...], tokens: Action) -> bool:
    """True where the next step of these sequences follows, or nothing but messages and the gather."""
    following = [a for a in rest if a.op not in (Op.RECV, Op.GATHER)]
    if tokens.step == STEPS - 1:
        return not following
    first = following[0]
    return (first.op, first.micro_batch, first.step) == (Op.DECODE, tokens.micro_batch, (tokens.step or 0) + 1)


def test_gather_and_chunk_end_the_lists() -> None:
    site = disaggregated((1, 2, 2), (1, 1, 1))
    round_, _, schedule = with_messages(site, "intra")
    actor, chunk = site.placements["actor"], round_.index
    for rank in actor.ranks:
        gather, *chunks = [a for a in schedule.of(rank) if a.op is Op.GATHER or a.payload is Payload.CHUNK]
        assert gather == Action(rank, Op.GATHER, "actor", 0, chunk)
        assert schedule.of(rank)[-1 - len(chunks) :] == (gather, *chunks)
        assert bool(chunks) == (rank == site.source)
    (listener,) = site.listeners
    assert str(schedule.of(listener)[-1]) == f"recv chunk actor m0 c{chunk} <- {site.source}"
