"""What the executor does reaches the cost meter as the stage that did it."""

from __future__ import annotations

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs, Linear
from oppo_megatron.train.logs.meter import RoundTracer

PLACES = {
    "actor": RolePlacement((0, 1, 2, 3), pp=4),
    "critic": RolePlacement((2, 3), pp=2),
    "reward": RolePlacement((0, 1, 2, 3), tp=2, pp=2),
}
STAGES = {"actor": 4, "critic": 2, "reward": 2}


def test_each_rank_feeds_its_stage_of_each_role() -> None:
    """Rank r takes r + 1 seconds for everything; the vectors of all ranks together give each stage its ranks' seconds."""
    vectors = []
    for rank in range(4):
        tracer = RoundTracer(SpanRecorder(rank), CostMeter(STAGES), Site(PLACES), actions=False, schedules=None)
        for role, placement in PLACES.items():
            op = Op.DECODE if role == "actor" else Op.PREFILL
            for n in (1, 2, 3, 4) if rank in placement.ranks else ():
                tracer(Action(rank, op, role, 0, 1, 0), 10.0, 11.0 + rank, n)
        tracer(Action(rank, Op.SEND, "actor", 0, 1, 0, Payload.HIDDEN, 0), 10.0, 90.0, 0)
        vectors.append(tracer.meter.to_vector())
    costs = CostMeter(STAGES, [sum(column) for column in zip(*vectors, strict=True)]).costs(Costs())
    assert costs.decode == tuple(Linear(float(rank + 1), 0.0) for rank in range(4))
    assert costs.prefill["critic"] == (Linear(3.0, 0.0), Linear(4.0, 0.0))
    assert costs.prefill["reward"] == (Linear(1.5, 0.0), Linear(3.5, 0.0))
