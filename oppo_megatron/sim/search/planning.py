"""From a configuration and a cluster to the best plans, each confirmed as the configuration that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.threads import threaded
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.search.emit import planned_config
from oppo_megatron.sim.search.exact import Clock, Found, Plan, Search, joined, search_exact
from oppo_megatron.sim.search.homes import Homes, arrangements, set_sizes, totals
from oppo_megatron.sim.search.inner import eased, micro_batches, repriced, with_micro_batch
from oppo_megatron.sim.search.mcmc import search_mcmc
from oppo_megatron.sim.search.scales import Scales
from oppo_megatron.sim.search.step import Mode, Parts, StepRule
from oppo_megatron.sim.search.table import PriceTable

Kind = Literal["exact", "mcmc"]
STRIDE = 7919
SPARE = 8
"""Plans kept beyond those asked for."""


@dataclass(frozen=True)
class Task:
    """What is planned.  `margin`: share of a rank's memory that stays free."""

    config: TrainConfig
    cluster: Cluster
    lengths: Sequence[int]
    margin: float = 0.1
    scales: Scales = Scales()
    limits: Callable[[int], int] | None = None

    def limit_of(self, seq_id: int) -> int:
        """Tokens of a response: by `limits`, else each of `lengths` in turn, dealt by a stride that no batch size divides."""
        if self.limits is not None:
            return self.limits(seq_id)
        return self.lengths[seq_id * STRIDE % len(self.lengths)]

    @property
    def budget(self) -> int:
        """Bytes of a rank that a plan may fill."""
        return int(self.cluster.gpu.memory_bytes * (1 - self.margin))

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.config.data.max_prompt_tokens, tuple(self.lengths))

    @property
    def on_cpu(self) -> bool:
        return self.cluster.gpu.on_cpu

    def on(self, ranks: int) -> Task:
        """With the cluster as a run of so many ranks sees it."""
        return replace(self, cluster=threaded(self.cluster, ranks, self.config.runtime.threads_per_rank))

    @property
    def mode(self) -> Mode:
        """How phases follow each other with the configuration's switches."""
        overlap = self.config.overlap
        share = min(1.0, overlap.chunk.tokens / max(1, max(self.lengths)))
        return Mode(overlap.intra, overlap.intra and "critic" not in self.config.debug.wait_for, share)


@dataclass(frozen=True)
class Confirmed:
    """A plan as a configuration that passes the checks; `rank_bytes`: what `--dry-run` counts of each rank.

    `parts` are of the closed form, or, where it was `played`, of steps in virtual time.
    """

    plan: Plan
    config: TrainConfig
    parts: Parts
    rank_bytes: Sequence[float]
    played: bool = False

    @property
    def step_ns(self) -> int:
        return self.parts.total

    @property
    def fullest_bytes(self) -> float:
        return max(self.rank_bytes)


@dataclass(frozen=True)
class Planned:
    """The result of one or more searches; `plans`: fastest first."""

    task: Task
    table: PriceTable
    searches: Sequence[Search]
    found: Found
    plans: Sequence[Confirmed] = field(default_factory=tuple)

    def rule(self, plan: Plan) -> StepRule:
        return self.searches[0].rule(plan.homes)


def new_table(task: Task) -> PriceTable:
    return PriceTable(task.config, task.cluster, task.decoding, task.budget, task.scales)


def new_search(task: Task, table: PriceTable, of: Sequence[int] | None = None) -> Search:
    """Over all homes on the cluster, or those that take one of so many ranks."""
    return Search(table, list(all_homes(task.cluster, table, of)), task.mode, task.budget)


def all_homes(cluster: Cluster, table: PriceTable, of: Sequence[int] | None = None) -> Sequence[Homes]:
    sizes = set_sizes(cluster.nodes, cluster.gpus_per_node)
    admitted = {role: [size for size in sizes if table.least(role, size)] for role in table.roles}
    return [
        homes
        for total in of or totals(cluster.nodes, cluster.gpus_per_node)
        for homes in arrangements(admitted, total, cluster.gpus_per_node)
    ]


def make_plan(task: Task, kind: Kind, top: int, seed: int, out_of_time: Clock, give_up: Clock) -> Planned:
    """Search, settle what is within the best plans, and confirm them.  `plans` is empty where nothing fits.

    `give_up` ends a search that has found no plan yet.  Where nothing fits with the configuration's micro-batches, smaller ones
    are searched.
    """
    own = task.config.runtime.micro_batch_tokens
    for tokens in [size for size in micro_batches(task.config) if size <= own]:
        tried = replace(task, config=with_micro_batch(task.config, tokens))
        planned = _searched(tried, kind, top, seed, out_of_time, give_up)
        if planned.plans or not planned.found.ended:
            break
    return planned


def _searched(task: Task, kind: Kind, top: int, seed: int, out_of_time: Clock, give_up: Clock) -> Planned:
    """On GPUs one search; on cores one for each number of ranks, for these share out the cores."""
    every = totals(task.cluster.nodes, task.cluster.gpus_per_node)
    founds, searches, plans, keep = list[Found](), list[Search](), list[Confirmed](), top + SPARE
    for some in [[total] for total in every] if task.on_cpu else [every]:
        own = task.on(max(some))
        table = new_table(own)
        search = new_search(own, table, some)
        if kind == "exact":
            found = search_exact(search, keep, out_of_time, give_up)
        else:
            found = search_mcmc(search, keep, seed, out_of_time)
        settled = [_settled(own, table, search, eased(search, plan)) for plan in found.plans]
        plans += [plan for plan in settled if plan is not None]
        founds.append(found)
        searches.append(search)
    plans.sort(key=lambda each: each.plan.step_ns)
    return Planned(task, table, searches, joined(founds), tuple(plans))


def _settled(task: Task, table: PriceTable, search: Search, plan: Plan) -> Confirmed | None:
    """With the micro-batch of least seconds that fits, and the chunk for it."""
    best: Confirmed | None = None
    for tokens in micro_batches(task.config):
        tried = replace(task, config=with_micro_batch(task.config, tokens))
        other = new_table(tried) if tokens != task.config.runtime.micro_batch_tokens else table
        again = plan if other is table else repriced(other, search, plan)
        if again.fullest_bytes <= task.budget and (best is None or again.step_ns < best.plan.step_ns):
            best = confirm(tried, other, again) or best
    return best


def confirm(task: Task, table: PriceTable, plan: Plan) -> Confirmed | None:
    """None where a check of the whole configuration refuses it, or it fills more of a rank than it may."""
    config = planned_config(task.config, plan)
    if check_layouts(config, table.shapes):
        return None
    memory = rank_memory(train_holdings(config, on_cpu=task.on_cpu))
    rank_bytes = [memory[rank].total for rank in sorted(memory)]
    if max(rank_bytes) > task.budget:
        return None
    rule, times = StepRule(table.roles, plan.homes, replace(task, config=config).mode), [o.times for o in plan.options]
    return Confirmed(replace(plan, step_ns=int(rule.step_ns(times))), config, rule.parts(times), rank_bytes)
