"""Rounds of many decode steps, planned and checked as rounds of three.

Where decoding has a rank's time to itself, each decode step but the first is like the one before it, on every rank: the
same micro-batches in the same order, each with the tokens of the step before, its hidden state from the stage before and
what it sends on.  Such a round *repeats*: its lists follow from those of a round of `STEPS` steps, whose last step comes
again and again.

And they are sound where those are.  Call a receive of tokens a part of the step that needs them.  Then an action waits for
actions of its own step or of the step before, nothing waits for a later step, and a list has its steps one behind the
other.  So ranks that wait for each other in a circle do so within one step, and messages in another order than sent are
of one step, too; step k > 2 is step 2 with other numbers, and that has been checked behind a step like the one before k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Batch, Growths, Round, Site

STEPS = 3
"""The first step has no tokens of the round before it, the second is the first that has, the third is like all after it."""


def repeats(generator: str, shape: Round, site: Site) -> bool:
    """Whether the round decodes longer than `STEPS`, and no scorer's work stands between two of its decode steps.

    What every generator promises settles that where no scorer works: a stage decodes by step, then micro-batch, behind the
    actor's prefill.  `intra` puts scorers before that, and so does `woven` where the actor has one stage.
    """
    if shape.steps <= STEPS:
        return False
    scores = any(any(replicas) for role, replicas in shape.prefill.items() if role != "actor")
    return not scores or generator == "intra" or (generator == "woven" and site.placements["actor"].pp == 1)


def shortened(shape: Round) -> Round:
    """The round's last `STEPS` decode steps, behind the same prefill.

    Each sequence is taken to have had its other tokens before the round: in the end its cache is as long as in the whole.
    So what the actor forks is taken to be cached.  Whether its forks are in order depends on the prefill alone, which
    `require_room` looks at.
    """
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
    """A rank's list of the round of `steps` decode steps, from that of the shortened round."""
    of_step = [_step(action) for action in own]
    last = [position for position, step in enumerate(of_step) if step == STEPS - 1]
    if not last:
        return tuple(own)
    start, end = last[0], last[-1] + 1
    assert len(last) == end - start, f"rank {own[0].rank}: something stands within step {STEPS - 1}, {own[start:end]}"
    repeated = (_later(own[i], by) for by in range(steps - STEPS + 1) for i in range(start, end))
    return (*own[:start], *repeated, *(_later(action, steps - STEPS) for action in own[end:]))


def _step(action: Action) -> int | None:
    """The step that the action is a part of; tokens are received for the step that continues them."""
    received = action.op is Op.RECV and action.payload is Payload.TOKENS
    return action.step + 1 if received and action.step is not None else action.step


def _later(action: Action, by: int) -> Action:
    if action.step is None or not by:
        return action
    return Action(
        action.rank, action.op, action.role, action.micro_batch, action.chunk, action.step + by, action.payload, action.peer
    )
