"""Plans: enumeration equals brute force with random prices; plans of random configurations pass the checks in their seconds."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from itertools import product
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.dataflow import Call, check, makespan_ns, play
from oppo_megatron.config.derived import batch_rows, least_micro_batch
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.runs.virtual import VirtualRun
from oppo_megatron.sim.search import blocks as blocks_module
from oppo_megatron.sim.search import playing
from oppo_megatron.sim.search.blocks import (
    TRAINERS,
    Block,
    Blocks,
    Mode,
    StepRule,
    Times,
    arrangements,
    block_sizes,
    part_starts,
    rests,
    run_sizes,
)
from oppo_megatron.sim.search.enumeration import Best, Space, enumerate_plans, held_bytes, lower_bounds
from oppo_megatron.sim.search.layouts import Option, undominated
from oppo_megatron.sim.search.planning import Task, find_plans, find_shortage, micro_batches, planned_config, spaces
from oppo_megatron.sim.search.playing import Played, play_plans, task_costs
from tests.unit.test_sim_search_plan import SMALL, tree

ROLES = ("actor", "reference", "critic", "reward")
TRAINED = ("actor", "critic", TRAINERS)
APART = ("actor", "critic", TRAINERS)
MODES = st.sampled_from([Mode(False, False), Mode(True, True, 0.25), Mode(True, False, 0.1)])


@dataclass
class Drawn:
    seed: int
    roles: tuple[str, ...] = ROLES
    most: int = 3
    budget: int = 100
    all: dict[tuple[str, int], list[Option]] = field(default_factory=dict)

    def options(self, role: str, size: int) -> list[Option]:
        key = (role, size)
        if key not in self.all:
            rng = random.Random(f"{self.seed} {role} {size}")
            self.all[key] = [self._option(rng, role, size, number) for number in range(rng.randint(0, self.most))]
        return self.all[key]

    def _option(self, rng: random.Random, role: str, size: int, number: int) -> Option:
        apart = TRAINERS in self.roles
        serves, trained = role != TRAINERS, role in TRAINED and not (apart and role == "actor")
        moves = role == "actor" or (trained and serves)
        pp = rng.choice([stages for stages in (1, 2, 4) if size % stages == 0])
        kinds = np.array([[rng.randint(5, 40) for _ in range(pp)] for _ in range(3)], dtype=np.int64)
        times = Times(serves * rng.randint(1, 60), trained * rng.randint(1, 60), moves * rng.choice([0, 5]))
        train = TrainingLayoutConfig(tp=1, pp=pp, dp=size // pp) if trained else None
        return Option(number, Sizes(1, pp, size // pp), train, times, kinds)

    def front(self, role: str, size: int) -> list[Option]:
        return undominated(self.options(role, size), lambda option: option, self.budget)

    def least(self, role: str, size: int) -> Times | None:
        options = self.options(role, size)
        return Times(*map(min, zip(*(o.times for o in options), strict=True))) if options else None


@cache
def places(nodes: int, gpus: int) -> list[Blocks]:
    return list(arrangements(dict.fromkeys(ROLES, block_sizes(nodes, gpus)), nodes * gpus, gpus))


def concrete(nodes: int, gpus: int, count: int, sizes: Iterable[int] = (), ends: Iterable[int] = ()) -> Iterator[Blocks]:
    """Every placement of roles on numbered ranks: equal, apart, or one a part of another that is part of none."""
    sizes, ends = sizes or block_sizes(nodes, gpus), set(ends or run_sizes(nodes, gpus))
    every = [(first, size) for size in sizes for first in range(0, nodes * gpus - size + 1)]
    sets = [blocks_module.Block(a, n) for a, n in every if (a % gpus == 0 if n >= gpus else a // gpus == (a + n - 1) // gpus)]
    for blocks in product(sets, repeat=count):
        different = set(blocks)
        inner = {a for a in different for b in different if a != b and b.contains(a)}
        nested = all(not (a != b and a.overlaps(b)) or a.contains(b) or b.contains(a) for a in different for b in different)
        flat = all(not (b in inner and b != a and b.contains(a)) for a in different for b in different)
        placed = all(a.first in part_starts(b, a.size, gpus) for a in inner for b in different if a != b and b.contains(a))
        held = {rank for block in different for rank in block.ranks}
        if placed and nested and flat and len(held) in ends and held == set(range(len(held))):
            yield blocks


def brute_force(prices: Drawn, tried: Iterable[Blocks], mode: Mode) -> int | None:
    """The least step of all placements and all options, dominated ones too; ranks counted one by one."""
    best: int | None = None
    for blocks in tried:
        rule = StepRule(prices.roles, blocks, mode)
        for options in product(*(prices.options(role, block.size) for role, block in zip(prices.roles, blocks, strict=True))):
            held: dict[int, list[tuple[int, int, int]]] = {}
            for block, option in zip(blocks, options, strict=True):
                for place, rank in enumerate(block.ranks):
                    stage = place * option.memory.shape[1] // block.size
                    held.setdefault(rank, []).append(tuple(option.memory[:, stage].tolist()))
            kinds = [[*zip(*own, strict=True)] for own in held.values()]
            fullest = max(sum(kept) + max(first) + max(second) for kept, first, second in kinds)
            step_ns = rule.step_ns([option.times for option in options])
            if fullest <= prices.budget and (best is None or step_ns < best):
                best = step_ns
    return best


def held_to_brute_force(prices: Drawn, nodes: int, gpus: int, mode: Mode) -> None:
    found = Best(3)
    admitted = {role: [s for s in block_sizes(nodes, gpus) if prices.least(role, s)] for role in prices.roles}
    tried = [blocks for total in run_sizes(nodes, gpus) for blocks in arrangements(admitted, total, gpus)]
    enumerate_plans(Space(prices, tried, mode, prices.budget), found)
    plans = found.plans
    assert (plans[0].step_ns if plans else None) == brute_force(prices, concrete(nodes, gpus, len(prices.roles)), mode)
    for plan in plans:
        assert int(held_bytes(plan.blocks, plan.options).sum(axis=0).max()) == plan.fullest_bytes <= prices.budget
        assert plan.step_ns == StepRule(prices.roles, plan.blocks, mode).step_ns([o.times for o in plan.options])


@settings(max_examples=40)
@given(st.integers(0, 10**6), MODES, st.sampled_from([(1, 2), (1, 4), (2, 2)]), st.sampled_from([60, 80, 100, 160]))
def test_exact_is_brute_force(seed: int, mode: Mode, cluster: tuple[int, int], budget: int) -> None:
    held_to_brute_force(Drawn(seed, ROLES[:3], most=5 if cluster == (1, 2) else 2, budget=budget), *cluster, mode)


@cache
def with_trainers(nodes: int, gpus: int, *, alone: bool) -> list[Blocks]:
    """Every placement of two roles, and of trainers on the ranks left over, or sharing an end with a role or the run."""
    sizes, found = block_sizes(nodes, gpus), list[Blocks]()
    for total in run_sizes(nodes, gpus):
        for held in rests(sizes, total) if alone else {total, *(size for size in sizes if size < total)}:
            for roles in concrete(nodes, gpus, 2, {held, *rests(sizes, held)} if alone else sizes, [held]):
                edges = {0, total, *(edge for block in roles for edge in (block.first, block.end))}
                for first, size in product(range(held + 1), [total - held] if alone else sizes):
                    last, fits = first + size - 1, max(held, first + size) == total
                    aligned = first % gpus == 0 if size >= gpus else first // gpus == last // gpus
                    if fits and edges & {first, first + size} and (first == held or (aligned and not alone)):
                        found.append((*roles, Block(first, size)))
    return [blocks for blocks in found if blocks[0] != blocks[-1]]


@settings(max_examples=60)
@given(
    st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 2)]), st.sampled_from([60, 80, 120]),
    st.one_of(MODES, st.sampled_from([Mode(True, True, 0.25, Fraction(0)), Mode(True, True, 0.25, Fraction(1, 3), pauses=True)])),
)  # fmt: skip
def test_plans_that_train_on_other_ranks_are_those_of_brute_force(
    seed: int, cluster: tuple[int, int], budget: int, mode: Mode
) -> None:
    (nodes, gpus), alone = cluster, mode.waits is not None
    together, apart = (Drawn(seed, roles, most=2, budget=budget) for roles in (APART[:2], APART))
    table: Any = SimpleNamespace(least=together.least, front=together.front, roles=together.roles, budget=budget)
    table.with_trainers = lambda: SimpleNamespace(least=apart.least, front=apart.front, roles=APART, budget=budget)
    task: Any = SimpleNamespace(
        cluster=SimpleNamespace(gpus_per_node=gpus), mode=mode, on_cpu=False, accepts=lambda plan: True,
        table=lambda ranks, tokens: table,
    )  # fmt: skip
    found = Best(3)
    for space in spaces(task, [1], nodes, (1, 3), (1,)):
        enumerate_plans(space, found)
    least = [brute_force(apart, with_trainers(nodes, gpus, alone=alone), mode)]
    least += [] if alone else [brute_force(together, concrete(nodes, gpus, 2), mode)]
    assert (found.plans[0].step_ns if found.plans else None) == min((ns for ns in least if ns is not None), default=None)
    for plan in found.plans:
        assert int(held_bytes(plan.blocks, plan.options).sum(axis=0).max()) == plan.fullest_bytes <= budget


@pytest.mark.long
@settings(max_examples=15)
@given(st.integers(0, 10**6), MODES, st.sampled_from([80, 120, 200]))
def test_exact_is_brute_force_on_two_nodes_of_four(seed: int, mode: Mode, budget: int) -> None:
    held_to_brute_force(Drawn(seed, ROLES[:3], most=2, budget=budget), 2, 4, mode)
    held_to_brute_force(Drawn(seed, ROLES, most=1, budget=budget), 2, 2, mode)


def step_calls(rule: StepRule, times: Sequence[Times]) -> list[Call]:
    """A step as calls.  Streamed scoring waits for its ranks alone, else for decoding; updates wait for all scores."""
    devices = {role: frozenset(block.ranks) for role, block in zip(rule.roles, rule.blocks, strict=True)}
    actor, *scorers = rule.roles
    before = () if rule.mode.streams else (f"{actor} decode",)
    calls = [Call(f"{actor} decode", devices[actor], times[0].serving)]
    calls += [Call(f"{r} score", devices[r], own.serving, before) for r, own in zip(scorers, times[1:], strict=True)]
    scored, each = tuple(call.name for call in calls), list(zip(rule.roles, times, strict=True))
    calls += [Call(f"{role} update", devices[role], own.update, scored) for role, own in each if own.update]
    return calls + [Call(f"{r} send", devices[r], own.weights, (f"{r} update",)) for r, own in each if own.weights]


@given(st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 4), (4, 2)]))
def test_the_closed_form_is_what_algorithm_1_plays(seed: int, cluster: tuple[int, int]) -> None:
    """Sequential phases; streamed ones take at least as long as the closed form says."""
    rng = random.Random(seed)
    blocks = rng.choice(places(*cluster))
    times = [Times(rng.randint(1, 99), *((rng.randint(1, 50), rng.randint(0, 50)) if role in TRAINED else ())) for role in ROLES]
    for mode in (Mode(False, False), Mode(True, False, 0.0)):
        rule = StepRule(ROLES, blocks, mode)
        calls = step_calls(rule, times)
        check(calls, spans := play(calls))
        assert rule.step_ns(times) <= makespan_ns(spans) if mode.streams else rule.step_ns(times) == makespan_ns(spans)


def test_each_way_to_place_roles_comes_once() -> None:
    """Concrete placements that a renumbering of nodes and ranks makes equal are one."""

    def pattern(blocks: Blocks) -> tuple[object, ...]:
        return tuple((a.size, tuple(a.first - b.first if a.overlaps(b) else None for b in blocks)) for a in blocks)

    for nodes, gpus in ((1, 4), (2, 2), (2, 4)):
        sizes = dict.fromkeys(ROLES[:3], block_sizes(nodes, gpus))
        found = [pattern(blocks) for total in run_sizes(nodes, gpus) for blocks in arrangements(sizes, total, gpus)]
        assert len(found) == len(set(found)) and set(found) == {pattern(blocks) for blocks in concrete(nodes, gpus, 3)}


@settings(max_examples=15)
@given(st.integers(0, 10**6), MODES)
def test_bounds_of_all_blocks_are_those_of_each(seed: int, mode: Mode) -> None:
    @cache
    def least(role: str, size: int) -> Times | None:
        rng = random.Random(f"{seed} {role} {size}")
        long = rng.choice([3, 300])
        return None if rng.random() < 0.05 else Times(rng.randint(1, long), rng.randint(0, long) if role in TRAINED else 0)

    drawn, sizes = Drawn(seed), block_sizes(1, 4)
    drawn.least = least  # type: ignore[method-assign]
    blocks = [each for total in run_sizes(1, 4) for each in arrangements(dict.fromkeys(ROLES, sizes), total, 4)]
    alone = {}
    for number, each in enumerate(blocks):
        times = [least(role, block.size) for role, block in zip(ROLES, each, strict=True)]
        if None not in times:
            alone[number] = StepRule(ROLES, each, mode).step_ns([known for known in times if known is not None])
    bounds = lower_bounds(Space(drawn, blocks, mode, drawn.budget))
    assert {number: bound for number, bound in enumerate(bounds.tolist()) if bound != float("inf")} == alone


def drawn_task(rng: random.Random) -> Task:
    preset, layers = rng.choice(["ppo", "grpo", "dapo", "online_dpo"]), rng.choice([4, 8, 16])
    prompt, response = rng.choice([64, 256, 1000]), rng.choice([64, 128, 256])
    group, shape = 1 if preset == "ppo" else rng.choice([2, 4]), SMALL | {"num_hidden_layers": layers}
    longest = (prompt + response) * (2 if preset == "online_dpo" else 1)
    backfill, chunk = rng.choice([False, True]), rng.choice([16, 64])
    inter = rng.random() < 0.5
    changes: dict[str, Any] = {
        "algorithm": {"preset": preset}, "critic": {"init": shape} if preset == "ppo" else None,
        "actor": {"init": shape} | ({"lora": {"rank": 8}} if rng.random() < 0.25 else {}), "reward": {"init": shape},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": prompt},
        "rollout": {"batch_size": 4 * rng.choice([2, 4, 8]), "group_size": group, "max_response_tokens": response},
        "ppo": {"minibatches": rng.choice([1, 2])},
        "overlap": {"intra": rng.random() < 0.5, "inter": inter, "backfill": inter and backfill,
            "delta": {"initial": 0, "max": rng.choice([0, 2])}, "chunk": chunk},
        "runtime": {"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": longest * rng.choice([1, 2, 8]),
            "kv_cache_mb": rng.choice([None, 64, 512])},
    }  # fmt: skip
    if preset != "dapo":
        changes["filter"] = None
    cluster = Cluster(
        rng.choice([1, 2]), rng.choice([1, 2, 4]), replace(GPUS["h100"], memory_bytes=rng.choice([6e9, 20e9, 80e9])),
        INSIDE["h100"], Between(19e-6, 50e9, 8, published("a test")),
    )  # fmt: skip
    config = TrainConfig.model_validate(tree(**changes))
    lengths = [rng.randint(1, response) for _ in range(batch_rows(config))]
    return Task(config, cluster, lengths, check=partial(train_problems, inputs=False))


def simulated_s(task: Task, config: TrainConfig, steps: int) -> float:
    run = VirtualRun(config, task_costs(task, config), task.limit_of, prompt_tokens=task.prompt_tokens, endless=True)
    return fmean([step.step_s for step in run.steps(steps)][steps // 3 :])


def held(seed: int) -> list[Played]:
    """Plan and prove; empty if the configuration itself is refused, or nothing fits."""
    task = drawn_task(random.Random(seed))
    if task.check(task.config):
        return []
    with mock.patch.multiple(playing, RESPONSES=(96, 96), FEW=4, MANY=4, LONG=6, LONG_RESPONSES=96):
        plans = play_plans(task, find_plans(task)[0], 2)
    for each in plans:
        assert train_problems(each.config, inputs=False) == []
        assert max(planned_memory(each.config, on_cpu=False)) <= task.budget(task.cluster)
        assert each.step_s == pytest.approx(simulated_s(task, each.config, 18), rel=0.15)
    if not plans:
        shortage = find_shortage(task)
        assert shortage is None or shortage.fullest.held > shortage.budget
        if shortage is not None and shortage.nodes is not None:
            assert find_plans(replace(task, cluster=replace(task.cluster, nodes=shortage.nodes)), 1)[0]
    return plans


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_plans_pass_the_checks_and_take_the_seconds_that_are_printed(seed: int) -> None:
    held(seed)


def test_every_size_of_micro_batches_passes_the_checks_and_a_plan_that_they_refuse_is_not_offered() -> None:
    least = 0
    for task in (drawn_task(random.Random(seed)) for seed in range(30)):
        sizes = micro_batches(task.config)
        least += min(sizes) == least_micro_batch(task.config)
        for size in sizes if not task.check(task.config) else ():
            assert task.check(task.config.with_values({"runtime.micro_batch_tokens": size})) == []
    assert least > 9
    task = drawn_task(random.Random(24))
    plans = [planned_config(task.config, plan) for plan in find_plans(task, 8)[0]]
    widest = max(config.actor.train.recompute for config in plans)
    some = replace(task, check=lambda config: ["refused"] * (config.actor.train.recompute == widest))
    offered = [planned_config(task.config, plan) for plan in find_plans(some, 8)[0]]
    assert offered and all(config.actor.train.recompute != widest for config in offered)
    none = replace(task, check=lambda config: ["refused"])
    assert not find_plans(none, 1)[0] and find_shortage(none) is None


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_more_plans_pass_the_checks_and_take_the_seconds_that_are_printed(part: int) -> None:
    assert sum(bool(held(seed)) for seed in range(8 * part, 8 * part + 8)) > 1
