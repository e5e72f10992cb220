"""A configuration with its own ranks and layouts, by the prices that plans are searched with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from oppo_megatron.config.model import TrainedRoleConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import RolePlacement, named_roles, role_placements, training_placements, world_size
from oppo_megatron.sim.search.finalists import played_ns
from oppo_megatron.sim.search.homes import Home, Homes
from oppo_megatron.sim.search.options import Option, Profile
from oppo_megatron.sim.search.planning import Planned, Task, new_table
from oppo_megatron.sim.search.shortage import Fullest
from oppo_megatron.sim.search.steady import Steady
from oppo_megatron.sim.search.step import StepRule, Times
from oppo_megatron.sim.search.table import PriceTable


def judged(planned: Planned, config: TrainConfig) -> dict[str, Any]:
    """Seconds of a step and the fullest rank, in words and numbers; how it compares with the best plan."""
    task, ranks = planned.task, world_size(config)
    if ranks > task.cluster.num_ranks:
        return {"told": f"refused: {ranks} ranks, and the cluster has {task.cluster.num_ranks}"}
    fullest, budget = Fullest.of(config, on_cpu=task.on_cpu), task.on(ranks).budget
    found: dict[str, Any] = {"fullest_gb": fullest.held / 1e9, "fits": fullest.held <= budget}
    memory = f"its fullest rank holds {fullest.held / 1e9:.1f} GB"
    if not found["fits"]:
        memory = f"refused, for it needs {fullest.told(budget)}"
    first, given = planned.plans[0], replace(task, config=config)
    price_ns = given_step_ns(given)
    step_ns = played_ns(given) if first.played else price_ns
    if step_ns is None:
        return found | {"told": f"{memory}; a role's ranks are not one run of ranks, which is not priced"}
    slower = step_ns / first.step_ns - 1
    told = f"{step_ns / 1e9:.3g} s a step, {abs(slower):.1%} {'more' if slower >= 0 else 'less'} than the first plan; {memory}"
    if first.played and price_ns is not None:
        told += f"; with nothing carried over its phases have a price of {price_ns / 1e9:.3g} s"
    return found | {"step_s": step_ns / 1e9, "price_s": price_ns and price_ns / 1e9, "told": told}


def given_step_ns(task: Task) -> int | None:
    """The price of a step of `task.config` in its own layouts, nothing carried over; None where a role's ranks have gaps."""
    homes, task = _homes(task.config), task.on(world_size(task.config))
    task = replace(task, known_work=Steady(task.decoding))
    if homes is None:
        return None
    table = new_table(task)
    times = [_times(table, role) for role in table.roles]
    return int(StepRule(table.roles, homes, task.mode).step_ns(times))


def _homes(config: TrainConfig) -> Homes | None:
    homes = []
    for placement in role_placements(config).values():
        first, size = placement.ranks[0], len(placement.ranks)
        if placement.ranks != tuple(range(first, first + size)):
            return None
        homes.append(Home(first, size))
    return tuple(homes)


def _times(table: PriceTable, role: str) -> Times:
    serving = Sizes.of(role_placements(table.config)[role])
    settings, nothing = named_roles(table.config)[role], Profile(np.zeros((3, 1), dtype=np.int64))
    option = Option(0, serving, None, Times(0), nothing)
    if isinstance(settings, TrainedRoleConfig):
        option = replace(
            option, train=settings.train.model_copy(update=_sizes(training_placements(table.config)[role]))
        )
    return table.weigh(role, table.again(role, option)).times


def _sizes(placement: RolePlacement) -> dict[str, int]:
    return {"tp": placement.tp, "pp": placement.pp, "dp": placement.dp}
