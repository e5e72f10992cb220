"""From a configuration and a cluster to the best plans, each confirmed as the configuration that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from oppo_megatron.config.derived import usual_prompt_tokens
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import named_roles, shares_weights
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.threads import threaded
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.search.emit import planned_config
from oppo_megatron.sim.search.exact import Clock, Found, Plan, Search, held_bytes, joined, never, search_exact
from oppo_megatron.sim.search.homes import Homes, arrangements, set_sizes, totals
from oppo_megatron.sim.search.inner import eased, micro_batches, repriced, with_micro_batch
from oppo_megatron.sim.search.mcmc import search_mcmc
from oppo_megatron.sim.search.options import Option
from oppo_megatron.sim.search.scales import Scales
from oppo_megatron.sim.search.steady import Steady, steady_work
from oppo_megatron.sim.search.step import Mode, Parts, StepRule
from oppo_megatron.sim.search.table import PriceTable

Kind = Literal["exact", "mcmc"]
STRIDE = 7919
FINALISTS = 50
"""Plans kept, to be played in virtual time."""


def layout_problems(config: TrainConfig) -> list[str]:
    """Every problem of the configuration's ranks and layouts."""
    return check_layouts(config, {name: read_hf_config(role) for name, role in named_roles(config).items()})


@dataclass(frozen=True)
class Task:
    """The task of a plan.  `margin`: share of a rank's memory that stays free; `known_work`: of a step, if found before.

    `prompt`: tokens of every prompt (None: `usual_prompt_tokens`).  `check`: every problem of a configuration, without which a
    plan is offered.
    """

    config: TrainConfig
    cluster: Cluster
    lengths: Sequence[int]
    margin: float = 0.1
    scales: Scales = Scales()
    limits: Callable[[int], int] | None = None
    known_work: Steady | None = None
    prompt: int | None = None
    check: Callable[[TrainConfig], Sequence[str]] = layout_problems

    @property
    def prompt_tokens(self) -> int:
        return self.prompt or usual_prompt_tokens(self.config)

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
        return Decoding(self.prompt_tokens, tuple(self.lengths))

    @property
    def steady(self) -> Steady:
        """What a step decodes and reads; no matter of layouts, cluster or micro-batches."""
        return self.known_work or steady_work(self.config, self.decoding, self.limit_of)

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
        share = min(1.0, overlap.chunk.tokens / max(self.steady.decoding.lengths))
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
class Contest:
    """So many `plans` were played for so many `steps`, and the `finalists` among them for `finalist_steps`.

    `least_ratio`, `most_ratio`: of played seconds over the price; `ended`: whether time was enough.
    """

    plans: int
    steps: int
    finalists: int
    finalist_steps: int
    least_ratio: float
    most_ratio: float
    ended: bool


@dataclass(frozen=True)
class Planned:
    """The result of searches with the micro-batches of `task`, and of those with others of the `sizes`.

    `plans`: fastest first; `contest`: how they were played, where they were.
    """

    task: Task
    tables: Sequence[_Tables]
    searches: Sequence[Search]
    found: Found
    plans: Sequence[Confirmed] = field(default_factory=tuple)
    sizes: Sequence[int] = field(default_factory=tuple)
    contest: Contest | None = None

    @property
    def table(self) -> PriceTable:
        return self.tables[0].table

    def rule(self, plan: Plan) -> StepRule:
        return self.searches[0].rule(plan.homes)


def new_table(task: Task) -> PriceTable:
    return PriceTable(task.config, task.cluster, task.decoding, task.steady, task.budget, task.scales)


def new_search(task: Task, table: PriceTable, homes: Sequence[Homes]) -> Search:
    """Over these homes."""
    if "reference" not in table.roles or not shares_weights(task.config):
        return Search(table, homes, task.mode, task.budget)
    role, apart = table.roles.index("reference"), dict[Sizes, Option]()
    own = table.with_config(task.config.model_copy(update={"reference": named_roles(task.config)["reference"]}))

    def shares_or_fits(plan: Plan) -> bool:
        """The table takes the reference to be computed over the actor's weights, which needs equal ranks and layouts."""
        actor, reference = plan.options[0], plan.options[role]
        if (plan.homes[role], reference.serving) == (plan.homes[0], actor.serving):
            return True
        if reference.serving not in apart:
            apart[reference.serving] = own.again("reference", reference)
        options = [*plan.options[:role], apart[reference.serving], *plan.options[role + 1 :]]
        return int(held_bytes(plan.homes, options).sum(axis=0).max()) <= task.budget

    return Search(table, homes, task.mode, task.budget, shares_or_fits)


def all_homes(cluster: Cluster, table: PriceTable, of: Sequence[int] | None = None) -> Sequence[Homes]:
    sizes = set_sizes(cluster.nodes, cluster.gpus_per_node)
    admitted = {role: [size for size in sizes if table.least(role, size)] for role in table.roles}
    return [
        homes
        for total in of or totals(cluster.nodes, cluster.gpus_per_node)
        for homes in arrangements(admitted, total, cluster.gpus_per_node)
    ]


def make_plan(
    task: Task, kind: Kind, top: int, seed: int, out_of_time: Clock, give_up: Clock, enough: Clock = never
) -> Planned:
    """Search, settle what is within the best plans, and confirm them.  `plans` is empty where nothing fits.

    `give_up` ends a search that has found no plan yet.  Once a size of micro-batches, the configuration's or less, lets something
    fit, the others are searched for a plan that is faster than all, one after the other until it is `enough`.
    """
    own, task, sizes = (
        task.config.runtime.micro_batch_tokens,
        replace(task, known_work=task.steady),
        micro_batches(task.config),
    )

    def with_size(tokens: int) -> Task:
        return replace(task, config=with_micro_batch(task.config, tokens))

    for fitting in [size for size in sizes if size <= own]:
        planned = _searched(with_size(fitting), sizes, (kind, top, seed), (out_of_time, give_up))
        if planned.plans or not planned.found.ended:
            break
    if kind == "exact" and planned.plans:
        for other in [size for size in sizes if size < fitting or size > own]:
            if not planned.found.ended or out_of_time() or enough():
                break
            planned = _with_faster(planned, with_size(other), out_of_time)
    return planned


def _searched(task: Task, sizes: Sequence[int], asked: tuple[Kind, int, int], clocks: tuple[Clock, Clock]) -> Planned:
    """With the task's micro-batches; what is found is settled with one of `sizes`."""
    (kind, top, seed), (out_of_time, give_up) = asked, clocks
    tables, founds, searches, plans = list[_Tables](), list[Found](), list[Search](), list[Confirmed]()
    for own, some in searched_apart(task):
        table = new_table(own)
        search = new_search(own, table, all_homes(own.cluster, table, some))
        if kind == "exact":
            found = search_exact(search, max(FINALISTS, top), out_of_time, give_up)
        else:
            found = search_mcmc(search, max(FINALISTS, top), seed, out_of_time)
        tables.append(_Tables(own, table, sizes))
        plans += _all_settled(tables[-1], search, found)
        founds.append(found)
        searches.append(search)
    return Planned(task, tables, searches, joined(founds), tuple(_one_of_each(plans)), (_size(task),))


def _with_faster(planned: Planned, task: Task, out_of_time: Clock) -> Planned:
    """And with a plan that is faster than all of them by the task's micro-batches, if there is one."""
    founds, plans = [planned.found], list(planned.plans)
    for tables, before in zip(planned.tables, planned.searches, strict=True):
        own, table = tables.of(_size(task))
        search = new_search(own, table, before.arrangements)
        found = search_exact(search, 1, out_of_time, known=[min(plans, key=lambda each: each.step_ns).plan])
        founds.append(replace(found, rest_ns=None))
        plans += _all_settled(tables, search, found)
    together = tuple(_one_of_each(plans))
    return replace(planned, found=joined(founds), plans=together, sizes=(*planned.sizes, _size(task)))


def _size(task: Task) -> int:
    return task.config.runtime.micro_batch_tokens


def _one_of_each(plans: Sequence[Confirmed]) -> Iterator[Confirmed]:
    """The fastest of each `Plan.key`, fastest first."""
    seen = set[object]()
    for each in sorted(plans, key=lambda each: each.plan.step_ns):
        if each.plan.key not in seen:
            seen.add(each.plan.key)
            yield each


def searched_apart(task: Task) -> Iterator[tuple[Task, Sequence[int]]]:
    """Tasks with the numbers of ranks to search: on GPUs all at once; on cores one by one, for ranks share out the cores."""
    every = totals(task.cluster.nodes, task.cluster.gpus_per_node)
    for some in [[total] for total in every] if task.on_cpu else [every]:
        yield task.on(max(some)), some


@dataclass(frozen=True)
class _Tables:
    """A task with its table of prices, and those for micro-batches of other `sizes`."""

    task: Task
    table: PriceTable
    sizes: Sequence[int]
    _others: dict[int, tuple[Task, PriceTable]] = field(default_factory=dict)

    def of(self, tokens: int) -> tuple[Task, PriceTable]:
        if tokens == _size(self.task):
            return self.task, self.table
        if tokens not in self._others:
            tried = replace(self.task, config=with_micro_batch(self.task.config, tokens))
            self._others[tokens] = tried, self.table.with_config(tried.config)
        return self._others[tokens]


def _all_settled(tables: _Tables, search: Search, found: Found) -> Iterator[Confirmed]:
    for plan in found.plans:
        settled = _settled(tables, search, eased(search, plan))
        if settled is not None:
            yield settled


def _settled(tables: _Tables, search: Search, plan: Plan) -> Confirmed | None:
    """With the micro-batch of least seconds that fits, and passes the checks."""
    tries = list[tuple[int, Task, Plan]]()
    for tokens in tables.sizes:
        tried, table = tables.of(tokens)
        again = plan if table is search.offers else repriced(table, search, plan)
        if again.fullest_bytes <= tried.budget:
            tries.append((again.step_ns, tried, again))
    tries.sort(key=lambda each: each[0])
    confirmed = (confirm(tried, tables.table, again) for _, tried, again in tries)
    return next((each for each in confirmed if each is not None), None)


def confirm(task: Task, table: PriceTable, plan: Plan) -> Confirmed | None:
    """The plan as a configuration.

    None where a check of the whole configuration refuses it, or it fills more of a rank than it may.
    """
    config = planned_config(task.config, plan)
    if task.check(config):
        return None
    memory = rank_memory(train_holdings(config, on_cpu=task.on_cpu))
    rank_bytes = [memory[rank].total for rank in sorted(memory)]
    if max(rank_bytes) > task.budget:
        return None
    rule, times = StepRule(table.roles, plan.homes, replace(task, config=config).mode), [o.times for o in plan.options]
    return Confirmed(replace(plan, step_ns=int(rule.step_ns(times))), config, rule.parts(times), rank_bytes)
