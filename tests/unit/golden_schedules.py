"""The small schedules that `golden/*.txt` hold: PP 1, 2 and 4 with one and two replicas, colocated and disaggregated.
Rewrite them after an intended change: `python -m tests.unit.golden_schedules`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Schedule
from oppo_megatron.schedule.rounds import Batch, Growth, Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.generators import GENERATORS

GOLDEN = Path(__file__).parent / "golden"

COSTS = Costs(
    decode=Linear(1.0, 0.0), sample=Linear(0.1, 0.0), default_prefill=Linear(0.4, 0.0), score=Linear(0.1, 0.0), message_s=0.01
)

SITES = {
    "pp1_colocated": Site({"actor": RolePlacement((0,)), "critic": RolePlacement((0,)), "reward": RolePlacement((0,))}),
    "pp1_dp2_disaggregated": Site({"actor": RolePlacement((0, 1), dp=2), "reward": RolePlacement((2,))}),
    "pp2_colocated": Site(
        {"actor": RolePlacement((0, 1), pp=2), "critic": RolePlacement((0, 1), pp=2), "reward": RolePlacement((0, 1), pp=2)}
    ),
    "pp2_layouts_differ": Site({"actor": RolePlacement((0, 1), pp=2), "reward": RolePlacement((0, 1), tp=2)}),
    "pp2_disaggregated": Site({"actor": RolePlacement((0, 1), pp=2), "reward": RolePlacement((2, 3), pp=2)}),
    "pp2_dp2_colocated": Site(
        {"actor": RolePlacement((0, 1, 2, 3), pp=2, dp=2), "reward": RolePlacement((0, 1, 2, 3), pp=2, dp=2)}
    ),
    "pp4_colocated": Site({"actor": RolePlacement((0, 1, 2, 3), pp=4), "reward": RolePlacement((0, 1, 2, 3), pp=4)}),
    "pp1_disaggregated": Site({"actor": RolePlacement((0,)), "reward": RolePlacement((1,))}),
    "pp1_dp2_colocated": Site({"actor": RolePlacement((0, 1), dp=2), "reward": RolePlacement((0, 1), dp=2)}),
    "pp2_dp2_disaggregated": Site({"actor": RolePlacement((0, 1, 2, 3), pp=2, dp=2), "reward": RolePlacement((4, 5), pp=2)}),
    "pp4_disaggregated": Site({"actor": RolePlacement((0, 1, 2, 3), pp=4), "reward": RolePlacement((4,))}),
    "pp4_dp2_colocated": Site(
        {"actor": RolePlacement(tuple(range(8)), pp=4, dp=2), "reward": RolePlacement(tuple(range(8)), pp=4, dp=2)}
    ),
    "pp4_dp2_disaggregated": Site({"actor": RolePlacement(tuple(range(8)), pp=4, dp=2), "reward": RolePlacement((8,))}),
}

NAMES = (
    "pp1_colocated.sequential",
    "pp1_colocated.woven",
    "pp1_dp2_disaggregated.intra",
    "pp2_colocated.sequential",
    "pp2_colocated.intra",
    "pp2_colocated.woven",
    "pp2_layouts_differ.woven",
    "pp2_disaggregated.intra",
    "pp2_dp2_colocated.woven",
    "pp4_colocated.woven",
    "pp1_disaggregated.intra",
    "pp1_dp2_colocated.woven",
    "pp2_dp2_disaggregated.intra",
    "pp4_disaggregated.intra",
    "pp4_dp2_colocated.woven",
    "pp4_dp2_disaggregated.intra",
)


def schedules() -> Iterator[tuple[str, Schedule]]:
    """Every golden schedule: chunk 1 is decoded in 2 steps, chunk 0 is scored in 2 micro-batches."""
    for name in NAMES:
        site_name, generator = name.split(".")
        site = SITES[site_name]
        round_ = _round(site, decode_batches=2 if site_name == "pp2_disaggregated" else 1)
        yield name, add_communication(GENERATORS[generator](round_, site, COSTS), round_, site)


def _round(site: Site, decode_batches: int) -> Round:
    actor = site.placements["actor"]
    decode, prompts = [], []
    for replica in range(actor.dp):
        decode.append(tuple(_batch(10 * replica + m, 5, 2) for m in range(decode_batches)))
        prompts.append((_batch(10 * replica, 0, 5),))
    prefill = {
        role: tuple(tuple(_batch(100 + 10 * d + j, 3, 4, 4) for j in range(2)) for d in range(placement.dp))
        for role, placement in site.placements.items()
        if role != "actor"
    }
    return Round(1, 2, tuple(decode), {"actor": tuple(prompts), **prefill})


def _batch(seq_id: int, past: int, new: int, rows: int = 0) -> Batch:
    return (Growth(seq_id, past, new, rows),)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for stale in GOLDEN.glob("*.txt"):
        stale.unlink()
    for title, schedule in schedules():
        (GOLDEN / f"{title}.txt").write_text(schedule.text(), encoding="utf-8")
