"""The files of `oppo plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.sim.search.planning import Planned


def write_plan(planned: Planned, record: Mapping[str, Any], out: Path) -> None:
    """plan.yaml, plan.json and costs.json of the first plan, and both pictures; says where they are."""
    from oppo_megatron.config.load import dump_config
    from oppo_megatron.report.plan_pictures import draw_pareto, draw_plan
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.schedule.weaving.costs_file import costs_tree
    from oppo_megatron.sim.pricing.prices import Prices, seen_by

    out.mkdir(parents=True, exist_ok=True)
    best = planned.plans[0]
    dump_config(best.config, out / "plan.yaml")
    write_json(out / "plan.json", record)
    prices = Prices(best.config, seen_by(best.config, planned.task.cluster), planned.task.decoding)
    write_json(out / "costs.json", costs_tree(prices.costs()))
    draw_plan(record, out / "plan.png")
    draw_pareto(record, out / "pareto.png")
    print(f"{out / 'plan.yaml'}, plan.json, costs.json, plan.png, pareto.png")
