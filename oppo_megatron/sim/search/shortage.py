"""What is missing where no plan fits: the role, the rank, the bytes, and how many nodes would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.sim.clusters.links import Between
from oppo_megatron.sim.clusters.sources import assumed
from oppo_megatron.sim.search.emit import planned_config
from oppo_megatron.sim.search.exact import Clock, Plan, held_bytes, search_exact
from oppo_megatron.sim.search.options import Option
from oppo_megatron.sim.search.planning import Task, all_homes, confirm, new_search, new_table, searched_apart

GB = 1e9
UNLIMITED = 2**62
MOST_NODES = 128
ANY_NETWORK = Between(19e-6, 50e9, 8, assumed("only memory is asked for"))
KINDS = {
    "kv_cache": "KV cache", "weights": "weights", "copy": "weights of the other layout", "gradients": "gradients",
    "optimizer": "optimizer", "activations": "activations",
}  # fmt: skip


@dataclass(frozen=True)
class Fullest:
    """The rank that holds most, in bytes; the role that holds most of it, and the kind of memory (of all its roles)."""

    rank: int
    held: float
    role: str
    kind: str
    kind_bytes: float

    @classmethod
    def of(cls, config: TrainConfig, *, on_cpu: bool) -> Fullest:
        """As `--dry-run` counts."""
        holdings = train_holdings(config, on_cpu=on_cpu)
        memory = rank_memory(holdings)
        rank = max(memory, key=lambda each: (memory[each].total, -each))
        by_role: dict[str, float] = {}
        for held in holdings:
            if held.rank == rank:
                name = held.role.partition(".")[0]
                by_role[name] = by_role.get(name, 0.0) + held.memory.total
        kinds = {name: float(getattr(memory[rank], key)) for key, name in KINDS.items()}
        role, kind = max(by_role, key=lambda name: by_role[name]), max(kinds, key=lambda name: kinds[name])
        return cls(rank, memory[rank].total, role, kind, kinds[kind])

    def told(self, budget: int) -> str:
        """What is missing of the budget, and for what."""
        remedy = "; runtime.kv_cache_mb bounds it" if self.kind == KINDS["kv_cache"] else ""
        return (
            f"{self.held / GB:.1f} GB on rank {self.rank}, most of it for {self.role} ({self.kind} of all roles there: "
            f"{self.kind_bytes / GB:.1f} GB{remedy}), and a rank may fill {budget / GB:.1f} GB: "
            f"{(self.held - budget) / GB:.1f} GB are missing"
        )


@dataclass(frozen=True)
class Shortage:
    """Of the plan that lacks least, on ranks that may fill `budget` bytes each.

    `nodes`: the least number that would do; None where none was found in time.
    """

    fullest: Fullest
    budget: int
    nodes: int | None

    def told(self) -> str:
        """`Fullest.told`."""
        return self.fullest.told(self.budget)


def find_shortage(task: Task, out_of_time: Clock) -> Shortage | None:
    """None where no layout passes the checks, whatever it takes.  `task`: as searched last, with the least micro-batches."""
    found = [_closest(*apart) for apart in searched_apart(task)]
    closest = min((each for each in found if each), key=lambda each: each.lacks, default=None)
    if closest is None:
        return None
    config = planned_config(task.config, closest.plan)
    return Shortage(Fullest.of(config, on_cpu=task.on_cpu), closest.budget, _least_nodes(task, out_of_time))


class _Closest(NamedTuple):
    """A plan whose fullest rank holds so much, and may hold `budget`."""

    plan: Plan
    budget: int

    @property
    def lacks(self) -> int:
        return self.plan.fullest_bytes - self.budget


def _closest(task: Task, some: Sequence[int]) -> _Closest | None:
    """For `some` numbers of ranks, the homes whose fullest rank needs least memory if every role has its smallest layout."""
    table = replace(new_table(task), budget=UNLIMITED)
    smallest: dict[tuple[str, int], Option] = {}
    plans = []
    for homes in all_homes(task.cluster, table, some):
        options = []
        for role, home in zip(table.roles, homes, strict=True):
            key = (role, home.size)
            if key not in smallest:
                smallest[key] = min(table.options(role, home.size), key=lambda o: (o.profile.fullest, o.number))
            options.append(smallest[key])
        plans.append(Plan(homes, tuple(options), 0, int(held_bytes(homes, options).sum(axis=0).max())))
    plans.sort(key=lambda each: each.fullest_bytes)
    legal = (each for each in plans if not task.check(planned_config(task.config, each)))
    best = next(legal, None)
    return None if best is None else _Closest(best, task.budget)


def _least_nodes(task: Task, out_of_time: Clock) -> int | None:
    """By doubling, then by halves between."""
    few = task.cluster.nodes
    many = 2 * few
    if many > MOST_NODES:
        return None
    while not out_of_time() and not _fits(task, many, out_of_time):
        few, many = many, 2 * many
        if many > MOST_NODES:
            return None
    while many - few > 1 and not out_of_time():
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(task, middle, out_of_time) else (middle, many)
    return None if out_of_time() else many


def _fits(task: Task, nodes: int, out_of_time: Clock) -> bool:
    cluster = replace(task.cluster, nodes=nodes, between=task.cluster.between or ANY_NETWORK)
    for own, some in searched_apart(replace(task, cluster=cluster)):
        table = new_table(own)
        search = new_search(own, table, all_homes(own.cluster, table, some))
        found = search_exact(search, 1, give_up=out_of_time, first_only=True)
        if any(confirm(own, table, plan) for plan in found.plans):
            return True
    return False
