from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from oppo_megatron.config.derived import least_micro_batch, usual_prompt_tokens
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.layouts import Sizes, divisors
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.layout.role_memory import rank_memory, train_holdings
from oppo_megatron.layout.shape import model_limits
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import Between, Cluster, Gpu, assumed, threaded
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.search.blocks import (
    MANY_NODES,
    TRAINERS,
    Block,
    Blocks,
    Mode,
    Trainers,
    arrangements,
    block_sizes,
    rests,
    run_sizes,
)
from oppo_megatron.sim.search.enumeration import Best, Plan, Space, enumerate_plans, held_bytes
from oppo_megatron.sim.search.layouts import Option, PriceTable, Steady, steady_work

STRIDE = 7919
"""Deals lengths to responses; no batch size divides it."""
FACTORS = (1, 2, 4, 0.5, 0.25, 0.125)
MOST_TOKENS = 32768
"""Micro-batches tried: the configuration's times a factor, up to a limit."""
FINALISTS = 24
"""Cheapest plans kept for playing."""
MOST_NODES = 128
ANY_NETWORK = Between(19e-6, 50e9, 8, assumed("only memory is asked for"))


Place = tuple[Block, Sizes]


def planned_config(config: TrainConfig, plan: Plan) -> TrainConfig:
    """A configuration with as few settings as possible."""
    roles = named_roles(config)
    names = (*roles, TRAINERS)[: len(plan.blocks)]
    blocks, options = dict(zip(names, plan.blocks, strict=True)), dict(zip(names, plan.options, strict=True))
    places = {name: (blocks[name], options[name].serving) for name in roles}
    placement, pools = _placement(places, max(block.end for block in plan.blocks))
    tree = config.model_dump() | {"placement": placement}
    trainers = options.pop(TRAINERS, None)
    for name, option in options.items():
        (block, sizes), pool = places[name], pools[name]
        own: dict[str, Any] = {"ranks": None, "parallel": None}
        if (block, sizes) != pool:
            own = {"ranks": None if block == pool[0] else format_ranks(block.ranks), "parallel": _sizes(sizes)}
        if name == "reference" and config.reference is None and not any(own.values()):
            continue
        tree[name] = roles[name].model_dump() | own
        if option.train is not None and option.training is not None:
            same = option.training[:3] == option.serving[:3]
            tree[name]["train"] = option.train.model_dump() | (dict.fromkeys(("tp", "pp", "dp")) if same else {})
    if trainers is not None and trainers.train is not None:
        tree["actor"]["train"] = trainers.train.model_dump() | {"ranks": format_ranks(blocks[TRAINERS].ranks)}
    if plan.micro_batch_tokens:
        tree["runtime"]["micro_batch_tokens"] = plan.micro_batch_tokens
    if not any(blocks["actor"].overlaps(blocks[name]) for name in roles if name != "actor"):
        tree["overlap"] |= {"schedule": "auto"} if tree["overlap"]["schedule"] == "woven" else {}
    return TrainConfig.model_validate(tree)


def _placement(places: Mapping[str, Place], num_ranks: int) -> tuple[dict[str, Any], Mapping[str, Place]]:
    """Return `placement`, and the ranks and layout that it gives each role."""
    actor, own = places["actor"]
    if num_ranks == 1:
        return {"mode": "single"}, places
    pool, others = (Block(0, actor.size), own), {name: place for name, place in places.items() if name != "actor"}
    with_actor = {name for name in ("reference",) if name in others and others[name][0] == actor}
    scorers = [place for name, place in others.items() if name not in with_actor]
    if scorers and actor.first == 0 and {block for block, _ in scorers} == {Block(actor.end, scorers[0][0].size)}:
        tree = {"mode": "disaggregated", "actor": _sizes(own), "scorer": _sizes(scorers[0][1])}
        tree |= dict.fromkeys(with_actor, "actor")
        return tree, {name: pool if name in {"actor", *with_actor} else scorers[0] for name in places}
    together = bool(others) and all(block == actor for block, _ in others.values())
    scorer = next(iter(others.values())) if together else pool
    tree = {"mode": "colocated", "actor": _sizes(own)} | ({"scorer": _sizes(scorer[1])} if scorer != pool else {})
    return tree, {name: pool if name == "actor" else scorer for name in places}


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {"tp": sizes.tp, "pp": sizes.pp, "dp": sizes.dp}


def layout_problems(config: TrainConfig) -> list[str]:
    return check_layouts(config, {name: read_hf_config(role) for name, role in named_roles(config).items()})


@dataclass(frozen=True)
class Task:
    """`lengths`: response tokens of a batch; `limits`: by number (None: `lengths` in turn); `margin`: free share of memory."""

    config: TrainConfig
    cluster: Cluster
    lengths: Sequence[int]
    margin: float = 0.1
    limits: Callable[[int], int] | None = None
    prompt: int | None = None
    check: Callable[[TrainConfig], Sequence[str]] = layout_problems
    _tables: dict[Gpu, dict[int, PriceTable]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def prompt_tokens(self) -> int:
        return self.prompt or usual_prompt_tokens(self.config)

    def limit_of(self, seq_id: int) -> int:
        return self.limits(seq_id) if self.limits else self.lengths[seq_id * STRIDE % len(self.lengths)]

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.prompt_tokens, tuple(self.lengths))

    @cached_property
    def steady(self) -> Steady:
        return steady_work(self.config, self.decoding, self.limit_of)

    @cached_property
    def mode(self) -> Mode:
        overlap = self.config.overlap
        longest, rules = max(self.steady.decoding.lengths), overlap.continuous
        share, hides = min(1.0, overlap.chunk_tokens / longest), overlap.intra and "critic" not in overlap.without
        if rules is None:
            return Mode(overlap.intra, hides, share)
        lag = longest if rules.lag_steps == "asap" else min(rules.lag_steps, longest)
        return Mode(overlap.intra, hides, share, Fraction(longest - lag, longest), rules.install == "pause")

    @property
    def on_cpu(self) -> bool:
        return self.cluster.gpu.on_cpu

    def cluster_of(self, ranks: int) -> Cluster:
        return threaded(self.cluster, ranks, self.config.runtime.threads_per_rank)

    def budget(self, cluster: Cluster) -> int:
        return int(cluster.gpu.memory_bytes * (1 - self.margin))

    def accepts(self, plan: Plan) -> bool:
        """Also check memory that the search has not counted to the byte: the reference may share the actor's weights, and a
        vocabulary is filled up for the tensor ranks of decoding and training, which are chosen apart.
        """
        config = planned_config(self.config, plan)
        if self.check(config):
            return False
        apart = config.actor.train.ranks is not None
        if not apart and (self.config.actor.lora is None or self.config.reference is not None):
            return True
        return Fullest.of(config, on_cpu=self.on_cpu).held <= self.budget(self.cluster_of(world_size(config)))

    def table(self, ranks: int, tokens: int) -> PriceTable:
        """Prices with micro-batches of `tokens` if `ranks` share the cluster, for any number of its nodes."""
        cluster = replace(self.cluster_of(ranks), between=self.cluster.between or ANY_NETWORK)
        tables = self._tables.setdefault(cluster.gpu, {})
        if tokens not in tables:
            config = self.config.with_values({"runtime.micro_batch_tokens": tokens})
            other = next(iter(tables.values()), None)
            new = PriceTable(config, cluster, self.decoding, self.steady, self.budget(cluster))
            tables[tokens] = new if other is None else other.with_config(config)
        return tables[tokens]


def micro_batches(config: TrainConfig) -> list[int]:
    """Sizes to try, the configuration's first; each fits the longest sequence."""
    own, least = config.runtime.micro_batch_tokens, least_micro_batch(config)
    sizes = dict.fromkeys(max(least, round(own * factor)) for factor in FACTORS)
    return [size for size in sizes if size in (own, least) or size <= MOST_TOKENS]


def multiples_of(config: TrainConfig, nodes: int) -> list[tuple[list[int], list[int]]]:
    """Return factors of `block_sizes` and `run_sizes`: a few, and odd ones of models' layers, tried if these give no plan."""
    layers = {model_limits(read_hf_config(role)).layers for role in named_roles(config).values()}
    odd = {factor for count in layers for factor in divisors(count) if factor % 2 and factor <= nodes}
    few, many = [1] if nodes > MANY_NODES else [1, 3], sorted({1, 3} | odd)
    return [(few, [1])] if many == few else [(few, [1]), (many, many)]


def spaces(task: Task, sizes: Sequence[int], nodes: int, blocks_by: Sequence[int], runs_by: Sequence[int]) -> Iterator[Space]:
    """Yield plans on `nodes` to search, on CPUs by number of ranks, and by micro-batch size: last those that train elsewhere.

    With continuous generation the trainers have all ranks that no role has; numbers of ranks are then also what others leave.
    """
    per_node, beside = task.cluster.gpus_per_node, task.mode.waits is not None
    every, blocks_of = run_sizes(nodes, per_node, runs_by), block_sizes(nodes, per_node, blocks_by)
    groups: list[Sequence[int]] = [[total] for total in every] if task.on_cpu else [every]
    for totals in groups:
        table, rows = task.table(max(totals), sizes[0]).with_trainers(), dict[int, list[Blocks]]()
        counts = {total: rests(blocks_of, total) if beside else {total, *blocks_of} for total in totals}
        held = [(total, count) for total in totals for count in sorted(counts[total]) if count <= total]
        for _, count in held:
            if count not in rows:
                tried = sorted({count, *rests(blocks_of, count)}) if beside else blocks_of
                admitted = {role: [size for size in tried if table.least(role, size)] for role in table.roles[:-1]}
                rows[count] = list(arrangements(admitted, count, per_node))
        if not beside:
            together = [blocks for total in totals for blocks in rows[total]]
            for tokens in sizes:
                table = task.table(max(totals), tokens)
                yield Space(table, together, task.mode, table.budget, task.accepts, tokens)
        for tokens in sizes:
            table = task.table(max(totals), tokens).with_trainers()
            tried = sorted({size for total in totals for size in counts[total]})
            updates = {size: times.update for size in tried if (times := table.least(TRAINERS, size))}
            if updates:
                fastest, trainers = min(updates, key=lambda size: updates[size]), Trainers(tuple(updates), per_node, beside)
                apart = [(*blocks, Block(total, fastest)) for total, count in held for blocks in rows[count]]
                yield Space(table, apart, task.mode, table.budget, task.accepts, tokens, trainers)


def find_plans(task: Task, keep: int = FINALISTS) -> tuple[list[Plan], int]:
    """Return the cheapest plans, one per actor's block and layouts, and the number of placements tried."""
    best = Best(keep)
    count = _search(task, micro_batches(task.config), task.cluster.nodes, best)
    return best.plans, count


def _search(task: Task, sizes: Sequence[int], nodes: int, best: Best, *, any_plan: bool = False) -> int:
    count = 0
    for multiples in multiples_of(task.config, nodes):
        for space in spaces(task, sizes, nodes, *multiples):
            enumerate_plans(space, best, any_plan=any_plan)
            count += len(space.places)
        if best.plans:
            break
    return count


@dataclass(frozen=True)
class Fullest:
    rank: int
    held: float
    role: str
    kind: str
    kind_bytes: float

    @classmethod
    def of(cls, config: TrainConfig, *, on_cpu: bool) -> Fullest:
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

    def describe(self, budget: int) -> str:
        remedy = "; runtime.kv_cache_mb bounds it" if self.kind == KINDS["kv_cache"] else ""
        return (
            f"{self.held / 1e9:.1f} GB on rank {self.rank}, most of it for {self.role} ({self.kind} of all roles there: "
            f"{self.kind_bytes / 1e9:.1f} GB{remedy}), and a rank may fill {budget / 1e9:.1f} GB: "
            f"{(self.held - budget) / 1e9:.1f} GB are missing"
        )


KINDS: Mapping[str, str] = {
    "kv_cache": "KV cache", "weights": "weights", "copy": "weights of the other layout", "gradients": "gradients",
    "optimizer": "optimizer", "activations": "activations",
}  # fmt: skip


@dataclass(frozen=True)
class Shortage:
    fullest: Fullest
    budget: int
    nodes: int | None


def find_shortage(task: Task) -> Shortage | None:
    """Count missing memory with the smallest micro-batches; None if no layout passes the checks."""
    least, plans = [min(micro_batches(task.config))], list[tuple[int, Plan, int]]()
    for space in spaces(task, least, task.cluster.nodes, *multiples_of(task.config, task.cluster.nodes)[-1]):
        if space.trainers is not None and not space.trainers.alone:
            continue  # far more places, which lack no less
        table, smallest = space.prices, dict[tuple[str, int], Option | None]()
        for blocks in space.closed(range(len(space.places))).places:
            for key in zip(table.roles, (block.size for block in blocks), strict=True):
                if key not in smallest:
                    every = sorted(table.options(*key), key=lambda o: (o.memory.sum(axis=0).max(), o.number))
                    smallest[key] = every[0] if every else None
            found = [smallest[role, block.size] for role, block in zip(table.roles, blocks, strict=True)]
            options = tuple(each for each in found if each is not None)
            if len(options) < len(found):
                continue
            fullest = int(held_bytes(blocks, options).sum(axis=0).max())
            plans.append((fullest - space.budget, Plan(blocks, options, 0, fullest, least[0]), space.budget))
    for _, plan, budget in sorted(plans, key=lambda each: each[0]):
        config = planned_config(task.config, plan)
        if not task.check(config):
            return Shortage(Fullest.of(config, on_cpu=task.on_cpu), budget, _least_nodes(task))
    return None


def _least_nodes(task: Task) -> int | None:
    few, many = task.cluster.nodes, 2 * task.cluster.nodes
    while many <= MOST_NODES and not _fits(task, many):
        few, many = many, 2 * many
    if many > MOST_NODES:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _fits(task, middle) else (middle, many)
    return many


def _fits(task: Task, nodes: int) -> bool:
    best = Best(1)
    _search(task, [min(micro_batches(task.config))], nodes, best, any_plan=True)
    return bool(best.plans)
