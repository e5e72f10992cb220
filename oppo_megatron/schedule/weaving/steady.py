"""Plan and check rounds of many decode steps as rounds of three, whose last step is repeated.

This is sound because an action waits only for its own step or the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Batch, Growths, Round, Site

STEPS = 3
"""The first step continues no tokens of the round, the second does, the third is like all later ones."""


def repeats(generator: str, shape: Round, site: Site) -> bool:
    """True if the round has more than `STEPS` decode steps, with no scorer between two of them."""
    if shape.steps <= STEPS:
        return False
    scores = any(any(replicas) for role, replicas in shape.prefill.items() if role != "actor")
    return not scores or generator == "intra" or (generator == "woven" and site.placements["actor"].pp == 1)


def shortened(shape: Round) -> Round:
    """Return the round's last `STEPS` decode steps; other tokens and the actor's forks count as cached before."""
    decoded = [Growths.of(batch) for replica in shape.decode for batch in replica]
    seq_ids = np.concatenate([np.zeros(0, dtype=np.int64), *(batch.seq_ids for batch in decoded)])
    earlier = np.concatenate([np.zeros(0, dtype=np.int64), *(np.maximum(0, batch.new - STEPS) for batch in decoded)])
    order = np.argsort(seq_ids)

    def later(batch: Batch) -> Growths:
        growths = Growths.of(batch)
        if not len(order):
            return growths
        found = order[np.minimum(np.searchsorted(seq_ids, growths.seq_ids, sorter=order), len(order) - 1)]
        more = np.where(seq_ids[found] == growths.seq_ids, earlier[found], 0)
        return Growths(np.stack([growths.seq_ids, growths.past + more, growths.new, growths.rows]))

    def last(batch: Batch) -> Batch:
        growths = later(batch)
        return Growths(np.stack([growths.seq_ids, growths.past, np.minimum(growths.new, STEPS), growths.rows]))

    decode = tuple(tuple(map(last, replica)) for replica in shape.decode)
    prompts = tuple(tuple(map(later, replica)) for replica in shape.prefill.get("actor", ()))
    forks = {role: own for role, own in shape.forks.items() if role != "actor"}
    return replace(shape, steps=STEPS, decode=decode, prefill={**shape.prefill, "actor": prompts}, forks=forks)


def lengthened(own: Sequence[Action], steps: int) -> tuple[Action, ...]:
    of_step = [_step(action) for action in own]
    last = [position for position, step in enumerate(of_step) if step == STEPS - 1]
    if not last:
        return tuple(own)
    start, end = last[0], last[-1] + 1
    assert len(last) == end - start, f"rank {own[0].rank}: another action within step {STEPS - 1}, {own[start:end]}"
    repeated = (_later(own[i], by) for by in range(steps - STEPS + 1) for i in range(start, end))
    return (*own[:start], *repeated, *(_later(action, steps - STEPS) for action in own[end:]))


def _step(action: Action) -> int | None:
    """Return the action's step; received tokens belong to the step that continues them."""
    received = action.op is Op.RECV and action.payload is Payload.TOKENS
    return action.step + 1 if received and action.step is not None else action.step


def _later(action: Action, by: int) -> Action:
    if action.step is None or not by:
        return action
    return Action(
        action.rank, action.op, action.role, action.micro_batch, action.chunk, action.step + by, action.payload, action.peer
    )
