"""Plans of random configurations and clusters pass the checks of `oppo train`, and take the seconds that are printed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.derived import batch_rows, least_micro_batch
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.runs.virtual import VirtualRun
from oppo_megatron.sim.search import playing
from oppo_megatron.sim.search.planning import Task, find_plans, find_shortage, micro_batches, planned_config
from oppo_megatron.sim.search.playing import Played, play_plans, task_costs
from tests.unit.test_sim_search_plan import SMALL, tree

BOUND = 0.15
"""Of the printed seconds: by what share a longer simulation may differ from them."""


def drawn(rng: random.Random) -> Task:
    """Models of 4 to 16 layers, with and without a critic, adapters, overlaps and bounded caches, on 1 to 8 GPUs."""
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
        "overlap": {
            "intra": rng.random() < 0.5, "inter": inter, "backfill": inter and backfill,
            "delta": {"initial": 0, "max": rng.choice([0, 2])}, "chunk": chunk,
        },
        "runtime": {
            "device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": longest * rng.choice([1, 2, 8]),
            "kv_cache_mb": rng.choice([None, 64, 512]),
        },
    }  # fmt: skip
    if preset != "dapo":
        changes["filter"] = None
    cluster = Cluster(
        rng.choice([1, 2]), rng.choice([1, 2, 4]),
        replace(GPUS["h100"], memory_bytes=rng.choice([6e9, 20e9, 80e9])), INSIDE["h100"],
        Between(19e-6, 50e9, 8, published("a test")),
    )  # fmt: skip
    config = TrainConfig.model_validate(tree(**changes))
    lengths = [rng.randint(1, response) for _ in range(batch_rows(config))]
    return Task(config, cluster, lengths, check=partial(train_problems, inputs=False))


@contextmanager
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"RESPONSES": (96, 96), "FEW": 4, "MANY": 4, "LONG": 6, "LONG_RESPONSES": 96}.items():
            patched.setattr(playing, name, value)
        yield


def simulated_s(task: Task, config: TrainConfig, steps: int) -> float:
    run = VirtualRun(config, task_costs(task, config), task.limit_of, prompt_tokens=task.prompt_tokens, endless=True)
    return fmean([step.step_s for step in run.steps(steps)][steps // 3 :])


def held(seed: int) -> list[Played]:
    """Plan and prove; empty if the configuration itself is refused, or nothing fits."""
    task = drawn(random.Random(seed))
    if task.check(task.config):
        return []
    with few_steps():
        plans = play_plans(task, find_plans(task)[0], 2)
    for each in plans:
        assert train_problems(each.config, inputs=False) == []
        assert max(planned_memory(each.config, on_cpu=False)) <= task.budget(task.cluster)
        assert each.step_s == pytest.approx(simulated_s(task, each.config, 18), rel=BOUND)
    if not plans:
        shortage = find_shortage(task)
        assert shortage is None or shortage.fullest.held > shortage.budget
        if shortage is not None and shortage.nodes is not None:
            assert find_plans(replace(task, cluster=replace(task.cluster, nodes=shortage.nodes)), 1)[0]
    return plans


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6))
def test_plans_pass_the_checks_and_take_the_seconds_that_are_printed(seed: int) -> None:
    held(seed)


def test_every_size_of_micro_batches_passes_the_checks() -> None:
    least = 0
    for task in (drawn(random.Random(seed)) for seed in range(30)):
        sizes = micro_batches(task.config)
        least += min(sizes) == least_micro_batch(task.config)
        for size in sizes if not task.check(task.config) else ():
            assert task.check(task.config.with_values({"runtime.micro_batch_tokens": size})) == []
    assert least > 9


def test_a_plan_that_the_checks_refuse_is_not_offered() -> None:
    task = drawn(random.Random(24))
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
