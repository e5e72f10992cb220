"""ReaL's calls, steps and plans predicted by the laws, with constants fitted to the other plans."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fitting.nonnegative import nonnegative_fit
from benchmarks.published.__main__ import main
from benchmarks.published.prediction import (
    NO_GRAPHS,
    order_is_right,
    predicted_calls,
    predicted_speedups,
    predicted_steps,
    unfitted_steps,
)
from benchmarks.published.tables import PLANS, SHAPES, PublishedPlan, cut_stages, least_largest
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import layout_tree, named_roles
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from tests.unit.test_sim_search_plan import tree

TABLES = {"70b-searched": 2, "70b-heuristic": 3, "7b-searched": 4, "7b-heuristic": 5}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_package_holds_the_tables_as_published(shared_data: Path) -> None:
    for plan in PLANS:
        printed = rows(shared_data / "real" / f"table{TABLES[plan.name]}.csv")
        nodes = {"trainer[01-16]": range(1, 17), "trainer[01-02]": (1, 2), "trainer01": (1,), "trainer02": (2,)}
        assert [
            (c.name, tuple(nodes[row["device_mesh"]]), c.tp, c.pp, c.dp, c.micro_batches, c.seconds)
            for c, row in zip(plan.calls, printed, strict=True)
        ] == [
            (row["call"], c.nodes, *(int(row[key]) for key in ("tp", "pp", "dp", "micro_batches")), float(row["time_s"]))
            for c, row in zip(plan.calls, printed, strict=True)
        ]
        assert all(call.tp * call.pp * call.dp == 8 * len(call.nodes) for call in plan.calls)
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    for row in rows(shared_data / "real" / "table1_models.csv"):
        shape = SHAPES[row["identifier"]]
        assert [shape[key] for key in keys] == [int(row[key]) for key in keys]
        assert (shape["num_hidden_layers"], shape["num_key_value_heads"]) == (int(row["num_layers"]), int(row["num_kv_heads"]))


def test_the_package_holds_the_seconds_of_steps_as_published(shared_data: Path) -> None:
    columns = {
        "70b-searched": "searched_70b_7b_s", "70b-heuristic": "heuristic_70b_7b_s", "7b-searched": "searched_7b_7b_s",
        "7b-heuristic": "heuristic_7b_7b_s",
    }  # fmt: skip
    table = {row["row"]: row for row in rows(shared_data / "real" / "table6.csv")}
    for plan in PLANS:
        column = columns[plan.name]
        with_graphs = float(table["End2End (with CUDAGraph)"][column])
        without = float(table["End2End (w.o. CUDAGraph)"][column])
        assert (plan.wall_s, plan.no_graph_wall_s) == (with_graphs, without)
        assert plan.no_graph_s == pytest.approx(plan.call("ActorGen").seconds + without - with_graphs, abs=0.01)
        if plan.name.startswith("7b"):  # of 70B + 7B the row is a misprint
            assert plan.no_graph_s == float(table["ActorGen (w.o. CUDAGraph)"][column])


def test_the_order_of_the_plans_needs_no_fit() -> None:
    steps = unfitted_steps()
    assert order_is_right(steps)
    assert not order_is_right({**steps, "7b-searched": steps["7b-heuristic"] + 1})


def test_calls_of_a_plan_that_was_left_out() -> None:
    errors = [abs(call.left_out_error) for call in predicted_calls() if call.what != NO_GRAPHS]
    assert len(errors) == 24
    assert fmean(errors) < 0.10 and max(errors) < 0.33
    without_generation = [abs(c.left_out_error) for c in predicted_calls() if not c.what.startswith("ActorGen")]
    assert len(without_generation) == 20 and fmean(without_generation) < 0.11


def test_steps_and_speedups_of_a_plan_that_was_left_out() -> None:
    errors = {step.plan: abs(step.left_out_error) for step in predicted_steps()}
    assert len(errors) == 4 and max(errors.values()) < 0.055
    assert max(abs(step.left_out_error) for step in predicted_steps(graphs=False)) < 0.075
    speedups = predicted_speedups()
    assert [round(speedup.published, 3) for speedup in speedups] == [1.427, 1.916]
    assert max(abs(speedup.left_out_error) for speedup in speedups) < 0.06


def test_stages_by_parameters() -> None:
    """ReaL's `partition_pipeline_layers`: the embedding takes the place of layers on a critic's first stage."""
    assert [stage.layers for stage in cut_stages(SHAPES["7B"], 4, scalar=True)] == [6, 9, 9, 8]
    assert [stage.layers for stage in cut_stages(SHAPES["70B"], 4, scalar=False)] == [19, 21, 21, 19]
    critic = cut_stages(SHAPES["7B"], 8, scalar=True)
    assert sum(stage.layers for stage in critic) == 32 and max(stage.layers for stage in critic) == 5
    assert [stage.has_head for stage in critic] == [False] * 7 + [True]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_the_largest_part_is_as_small_as_can_be(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    cuts = least_largest(tuple(sizes), parts)
    largest = max(sum(sizes[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    assert cuts[0] == 0 and cuts[-1] == len(sizes) and len(cuts) == parts + 1 and list(cuts) == sorted(set(cuts))
    assert largest == _brute_force(sizes, parts)


def _brute_force(sizes: list[int], parts: int) -> int:
    if parts == 1:
        return sum(sizes)
    ends = range(1, len(sizes) - parts + 2)
    return min(max(sum(sizes[:end]), _brute_force(sizes[end:], parts - 1)) for end in ends)


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_its_conditions(seed: int) -> None:
    """No residual falls by more of any column at the optimum, and none of a column that is used by less of it."""
    draws = np.random.default_rng(seed)
    features, target = draws.normal(size=(9, 4)), draws.normal(size=9)
    found = nonnegative_fit(features, target)
    slope = features.T @ (features @ found - target)
    assert (found >= 0).all() and (slope > -1e-8).all() and np.abs(slope[found > 0]).max(initial=0) < 1e-8


def test_the_command_prints_fitted_and_left_out_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for gpu in GPUS.values():
        assert f"gpu.efficiencies: {gpu.sources['efficiencies']}" in out
    assert "left out" in out and "the order of the plans is right" in out
    tree = json.loads((tmp_path / "published.json").read_text())
    assert len(tree["calls"]) == 28 and len(tree["steps"]) == 8 and len(tree["speedups"]) == 2
    assert f"mean {tree['errors']['left_out_mean']:.1f} %, worst {tree['errors']['left_out_worst']:.1f} %" in out
    assert tree["played"][2]["others_s"] == pytest.approx([63.1])


def decode_micro_batches(plan: PublishedPlan) -> int:
    call = plan.call("ActorGen")
    return call.micro_batches * call.pp


def published_tree(plan: PublishedPlan, **runtime: Any) -> dict[str, Any]:
    def sizes(name: str) -> dict[str, int]:
        call = plan.call(name)
        return {"tp": call.tp, "pp": call.pp, "dp": call.dp}

    def shape(name: str) -> dict[str, Any]:
        return {**SHAPES[plan.call(name).model], "max_position_embeddings": 4096}

    train = {"recompute": "full"}
    return tree(
        placement={"mode": "colocated", "actor": sizes("ActorGen")},
        actor={"init": shape("ActorGen"), "train": sizes("ActorTrain") | train},
        critic={"init": shape("CriticInf"), "parallel": sizes("CriticInf"), "train": sizes("CriticTrain") | train},
        reward={"init": shape("RewInf"), "parallel": sizes("RewInf")},
        reference={"init": shape("RefInf"), "parallel": sizes("RefInf")},
        rollout={"batch_size": plan.batch, "max_response_tokens": 1024},
        data={"path": "rows.jsonl", "max_prompt_tokens": 1024},
        ppo={"minibatches": 8},
        overlap={"intra": False, "inter": False, "weave": [decode_micro_batches(plan), "auto"]},
        runtime={"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 8192, **runtime},
    )


TOGETHER = [plan for plan in PLANS if plan.name != "7b-searched"]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_published_plans_load_as_configurations(plan: PublishedPlan) -> None:
    loaded = TrainConfig.model_validate(published_tree(plan))
    assert check_layouts(loaded, {name: read_hf_config(role) for name, role in named_roles(loaded).items()}) == []
    layouts = layout_tree(loaded)
    for role, call in (("actor", "ActorGen"), ("actor, trained", "ActorTrain"), ("critic, trained", "CriticTrain")):
        found = plan.call(call)
        assert layouts[role][1:] == [found.tp, found.pp, found.dp]


@pytest.mark.parametrize("plan", TOGETHER, ids=lambda plan: plan.name)
def test_generation_of_published_plans_is_priced(plan: PublishedPlan) -> None:
    nodes, network = len(plan.call("ActorGen").nodes), Between(19e-6, 25e9, 1, published("a test"))
    cluster = Cluster(nodes, 8, GPUS["h100"], INSIDE["h100"], network)
    loaded = TrainConfig.model_validate(published_tree(plan))
    told = {True: (plan.call("ActorGen").seconds, plan.wall_s), False: (plan.no_graph_s, plan.no_graph_wall_s)}
    for captured, (seconds, wall_s) in told.items():
        rows = Prices(loaded, cluster, Decoding(1024, [1024] * plan.batch, captured)).rows()
        generation = rows["actor", "prompts"] + rows["actor", "decode"]
        assert generation == pytest.approx(seconds, rel=0.09)
        assert 0.8 < sum(rows.values()) / wall_s < 1.0
