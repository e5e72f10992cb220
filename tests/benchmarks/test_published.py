"""OPPO's and ReaL's figures: our copies against the files, the arithmetic between them, and what our laws make of them."""

import csv
import heapq
import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fitting.nonnegative import nonnegative_fit
from benchmarks.paper import __main__ as paper_script
from benchmarks.paper import figures as studies
from benchmarks.paper import printed as oppo
from benchmarks.paper.assumptions import SETTINGS
from benchmarks.paper.figures import Paper, implied_delta
from benchmarks.published import __main__ as published_script
from benchmarks.published import prediction
from benchmarks.published.dataflow import Call, Carried, Span, check, iterations, makespan_ns, nanoseconds, period_ns, play
from benchmarks.published.prediction import NO_GRAPHS, Costs, steady_step_s, step_calls, step_s, tie_orders
from benchmarks.published.tables import PLANS, SHAPES, PublishedPlan, cut_stages, least_largest, plan_named
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import layout_tree, named_roles
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices
from tests.unit.test_sim_search_plan import tree

STEPS, DEVICES = 10, 5
TABLES = {"70b-searched": 2, "70b-heuristic": 3, "7b-searched": 4, "7b-heuristic": 5}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    return float(text) if text else None


# OPPO


def test_the_package_holds_what_oppos_paper_prints(shared_data: Path) -> None:
    printed = {file.stem: [list(row.values()) for row in rows(file)] for file in (shared_data / "oppo_paper").glob("*.csv")}
    constants = {row[0]: row[1] for row in printed["constants"]}
    assert str(oppo.BATCH) == constants["batch_size"]
    assert str(oppo.GPUS_TRAINING) == constants["gpus_generation_and_training"]
    assert str(oppo.GPUS_SCORING) == constants["gpus_scoring"]
    assert ";".join(map(str, oppo.CHUNK_CANDIDATES)) == constants["chunk_candidates"]
    assert str(oppo.SCORING_HIDDEN_PERCENT) == constants["scoring_latency_hidden_by_intra"]
    assert "-".join(map(str, oppo.HEADLINE_SPEEDUP)) == constants["headline_speedup"]
    assert [str(steps) for steps in oppo.EVAL_STEPS.values()] == [constants["eval_steps_7b"], constants["eval_steps_3b"]]
    assert [[row.setup, row.target_reward, row.baseline_minutes, row.oppo_minutes, row.stated] for row in oppo.SPEEDUPS] == [
        [row[0], *map(number, row[1:5])] for row in printed["speedups"]
    ]
    assert [[row.setup, row.variant, row.minutes, row.stated] for row in oppo.ABLATION] == [
        [row[0], row[1], *map(number, row[2:4])] for row in printed["ablation"]
    ]
    assert [[row.setup, row.baseline, row.oppo, row.stated] for row in oppo.UTILIZATION] == [
        [row[0], *map(float, row[1:4])] for row in printed["utilization"]
    ]
    *shares, (_, mean) = printed["table2_deferral"]
    assert oppo.DEFERRED_PERCENT == {int(steps): float(share) for steps, share in shares}
    assert float(mean) == oppo.DEFERRED_MEAN
    assert [list(policy) for policy in oppo.DELTA_POLICIES] == [row[1:3] for row in printed["figure7a_delta"]]
    assert oppo.CHUNKS == {row[0]: row[1] for row in printed["figure7b_chunk"]}
    assert oppo.MULTINODE_S == {row[0]: float(row[1]) for row in printed["table1_multinode"]}
    assert oppo.FRAMEWORKS_S == {row[0]: float(row[1]) for row in printed["table4_frameworks"]}
    (_, *first), *last = [(row[0], int(row[1]), float(row[2])) for row in printed["figure4_convergence"][:3]]
    assert oppo.REWARD_POINTS == {setup: (tuple(first), (step, reward)) for setup, step, reward in last}

    layers = {"Qwen2.5-7B": 28, "Qwen2.5-3B": 36}
    played = {row[0]: row for row in printed["setups"] if row[0] in SETTINGS}
    assert played.keys() == {name for name in SETTINGS if "rule-based" not in name}
    for name, setting in SETTINGS.items():
        _, _, model, gpus, _, memory_gb, _ = played[name.partition(" ")[0]]
        assert setting.actor["num_hidden_layers"] == layers[model.removesuffix("-Instruct")]
        assert setting.cluster().num_ranks == int(gpus)
        assert setting.cluster().gpu.memory_bytes == pytest.approx(1e9 * float(memory_gb))


def test_what_oppos_figures_say_of_each_other() -> None:
    found = {check.where: check for check in oppo.checks()}
    for where, printed, computed, verdict in (
        ("table 2: shares, %", 100, 99.96, "contradict"), ("table 2: mean delta", 8, 26.88, "unexplained"),
        ("table 2: mean deferrals at delta 4", 0.24, 0.0357, "unexplained"),
        ("table 2: mean deferrals at delta 8", 0.24, 0.0714, "unexplained"),
        ("figure 6, se7b: product of both gains", 1.8696, 1.8667, "agree"),
        ("figure 6, se3b: product of both gains", 2.5, 2.6825, "unexplained"),
        ("section 4.3: per cent of scoring hidden", 17, 16.667, "contradict"),
        ("se7b: minutes of the baseline", 4300, 4200, "contradict"), ("GSM8K: speed-up in figure 3", 2.8, 2.35, "contradict"),
        ("table 1 against the abstract", 2.8, 4.486, "contradict"),
        ("figure 5, se7b: busy time left, %", 100, 75.05, "unexplained"),
        ("figure 5, se3b: busy time left, %", 100, 76.07, "unexplained"),
        ("figure 5, gsm8k7b: busy time left, %", 100, 52.59, "unexplained"),
        ("figure 5, code3b: busy time left, %", 100, 86.48, "unexplained"),
        ("eq. 4 against Algorithm 1, line 24", 1, -1, "contradict"),
    ):  # fmt: skip
        check = found[where]
        figures = (pytest.approx(printed, rel=1e-3), pytest.approx(computed, rel=1e-3), verdict)
        assert (check.printed, check.computed, check.verdict) == figures and check.arithmetic, where


@pytest.fixture(scope="module")
def paper() -> Paper:
    return Paper(STEPS, 0)


@pytest.mark.parametrize("delta", [4, implied_delta()])
def test_mean_deferrals_are_the_mean_delta_over_the_batch(paper: Paper, delta: int) -> None:
    """Every step carries delta rollouts, and each of them counts once, when it is trained or while it waits."""
    run = paper.mode("se7b", "full", delta)
    trained = sum(int(step.deferrals.sum()) for step in run.steps)
    carried = sum(step.line["carried"] for step in run.steps)
    assert carried == delta * STEPS and len(run.steady) == STEPS - STEPS // 5
    longest = paper.case("se7b").config.overlap.max_staleness
    assert carried - delta * longest <= trained <= carried
    assert run.deferrals == pytest.approx(delta / run.batch, abs=delta * longest / run.batch / len(run.steady))


@pytest.mark.long
def test_inter_step_overlap_gains_with_delta(paper: Paper) -> None:
    rows = paper.inter()
    assert [row["delta"] for row in rows] == list(studies.INTER_DELTAS)
    assert np.all(np.diff([row["step_s"] for row in rows]) < 0)
    assert np.all(np.diff([row["decode_steps"] for row in rows]) < 0)
    assert rows[0]["speedup"] == 1 and rows[0]["deferrals"] == 0


@pytest.mark.long
@pytest.mark.parametrize("setup", ["se7b", "se3b"])
def test_intra_step_overlap_hides_scoring_and_no_more(paper: Paper, setup: str) -> None:
    """It cannot exceed 1 / (1 - scoring's share of the step); both overlaps gain more than either."""
    intra, inter, full = (row for row in paper.ablation() if row["setup"] == setup)
    base = paper.mode(setup, "sequential")
    assert 1 < intra["speedup"] <= intra["bound"] == pytest.approx(1 / (1 - base.scored_s / base.step_s))
    assert full["speedup"] > max(intra["speedup"], inter["speedup"])


@pytest.mark.long
def test_oppos_figures_are_printed_beside_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies, "CHUNKS", (500, 4096))
    monkeypatch.setattr(studies, "INTER_DELTAS", (0, 8))
    assert paper_script.main(["--steps", "5", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for figure in ("figure 3", "figure 5", "figure 6", "figure 7a", "figure 7b", "table 1", "table 2", "table 4"):
        assert f" {figure}  " in said or f"\n{figure}  " in said, figure
    found = json.loads((tmp_path / "paper.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"paper.json"}
    printed = {row["what"]: row["printed"] for row in found["comparison"]}
    assert printed["se3b: inter"] == 13000 / 6300 and printed["speed-up over TRL"] == 498.30 / 111.08
    assert all(row["why"] for row in found["comparison"]) and all(row["why"] for row in found["assumed"])
    assert paper_script.main(["--steps", "5", "--out", str(tmp_path)]) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.long
def test_the_page_has_the_figures_of_the_command() -> None:
    page, whole = (Path(__file__).resolve().parents[2] / "benchmarks" / "README.md").read_text(encoding="utf-8"), Paper(100, 0)
    for row in whole.speedups():
        cells = " | ".join(f"{row[key]:.2f}" for key in ("speedup", "speedup_implied", "speedup_padded"))
        assert f"| {cells} | {row['stated']:g} |" in page
    rows = whole.ablation()
    for three in (rows[:3], rows[3:]):
        simulated, printed = (", ".join(f"{row[key]:.2f}" for row in three) for key in ("speedup", "printed"))
        assert f"| {simulated} | {printed} |" in page
    means = ", ".join(f"{row['mean']:.2f}" for row in whole.deferral()[1:])
    assert f"| {means} | 0.24 |" in page


# ReaL


def test_the_package_holds_reals_tables(shared_data: Path) -> None:
    nodes = {"trainer[01-16]": range(1, 17), "trainer[01-02]": (1, 2), "trainer01": (1,), "trainer02": (2,)}
    sizes = ("tp", "pp", "dp", "micro_batches")
    steps = {row["row"]: row for row in rows(shared_data / "real" / "table6.csv")}
    for plan in PLANS:
        assert [(c.name, tuple(c.nodes), c.tp, c.pp, c.dp, c.micro_batches, c.seconds) for c in plan.calls] == [
            (row["call"], tuple(nodes[row["device_mesh"]]), *(int(row[key]) for key in sizes), float(row["time_s"]))
            for row in rows(shared_data / "real" / f"table{TABLES[plan.name]}.csv")
        ]
        assert all(call.tp * call.pp * call.dp == 8 * len(call.nodes) for call in plan.calls)
        model, kind = plan.name.split("-")
        column = f"{kind}_{model}_7b_s"
        plan_s, no_graph_s = (float(steps[f"End2End ({how} CUDAGraph)"][column]) for how in ("with", "w.o."))
        assert (plan.wall_s, plan.no_graph_wall_s) == (plan_s, no_graph_s)
        assert plan.no_graph_s == pytest.approx(plan.call("ActorGen").seconds + no_graph_s - plan_s, abs=0.01)
        if model == "7b":  # of 70B + 7B the row is a misprint
            assert plan.no_graph_s == float(steps["ActorGen (w.o. CUDAGraph)"][column])
    keys = {name: name for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    for row in rows(shared_data / "real" / "table1_models.csv"):
        for ours, theirs in (keys | {"num_hidden_layers": "num_layers", "num_key_value_heads": "num_kv_heads"}).items():
            assert SHAPES[row["identifier"]][ours] == int(row[theirs])


def test_plans_that_were_left_out_are_predicted() -> None:
    steps = prediction.unfitted_steps()
    assert prediction.order_is_right(steps), "the order of the plans needs no fit"
    assert not prediction.order_is_right({**steps, "7b-searched": steps["7b-heuristic"] + 1})
    calls = list(prediction.predicted_calls())
    errors = [abs(call.left_out_error) for call in calls if call.what != NO_GRAPHS]
    assert len(errors) == 24 and fmean(errors) < 0.10 and max(errors) < 0.33
    without_generation = [abs(call.left_out_error) for call in calls if not call.what.startswith("ActorGen")]
    assert len(without_generation) == 20 and fmean(without_generation) < 0.11
    of_steps = [abs(step.left_out_error) for step in prediction.predicted_steps()]
    assert len(of_steps) == 4 and max(of_steps) < 0.055
    assert max(abs(step.left_out_error) for step in prediction.predicted_steps(graphs=False)) < 0.075
    speedups = prediction.predicted_speedups()
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
    assert cuts[0] == 0 and cuts[-1] == len(sizes) and len(cuts) == parts + 1 and list(cuts) == sorted(set(cuts))
    every = [(0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), parts - 1)]
    largest = {each: max(sum(sizes[a:b]) for a, b in zip(each, each[1:], strict=False)) for each in every}
    assert largest[tuple(cuts)] == min(largest.values())


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_its_conditions(seed: int) -> None:
    """No residual falls by more of any column at the optimum, and none of a column that is used by less of it."""
    draws = np.random.default_rng(seed)
    features, target = draws.normal(size=(9, 4)), draws.normal(size=9)
    found = nonnegative_fit(features, target)
    slope = features.T @ (features @ found - target)
    assert (found >= 0).all() and (slope > -1e-8).all() and np.abs(slope[found > 0]).max(initial=0) < 1e-8


def test_fitted_and_left_out_rows_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published_script.main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for gpu in GPUS.values():
        assert f"gpu.efficiencies: {gpu.sources['efficiencies']}" in out
    assert "left out" in out and "the order of the plans is right" in out
    tree = json.loads((tmp_path / "published.json").read_text())
    assert len(tree["calls"]) == 28 and len(tree["steps"]) == 8 and len(tree["speedups"]) == 2
    assert f"mean {tree['errors']['left_out_mean']:.1f} %, worst {tree['errors']['left_out_worst']:.1f} %" in out
    assert tree["played"][2]["others_s"] == pytest.approx([63.1])


def published_tree(plan: PublishedPlan) -> dict[str, Any]:
    def role(name: str) -> dict[str, Any]:
        call = plan.call(name)
        shape = {**SHAPES[call.model], "max_position_embeddings": 4096}
        return {"init": shape, "parallel": {"tp": call.tp, "pp": call.pp, "dp": call.dp}}

    actor, trained, critic = role("ActorGen"), role("ActorTrain")["parallel"], role("CriticTrain")["parallel"]
    generation, recompute = plan.call("ActorGen"), {"recompute": "full"}
    return tree(
        placement={"mode": "colocated", "actor": actor["parallel"]}, actor={"init": actor["init"], "train": trained | recompute},
        critic=role("CriticInf") | {"train": critic | recompute}, reward=role("RewInf"), reference=role("RefInf"),
        rollout={"batch_size": plan.batch, "max_response_tokens": 1024}, data={"path": "rows.jsonl", "max_prompt_tokens": 1024},
        ppo={"minibatches": 8},
        overlap={"intra": False, "inter": False, "weave": [generation.micro_batches * generation.pp, "auto"]},
        runtime={"device": "cpu", "dtype": "bfloat16", "micro_batch_tokens": 8192},
    )  # fmt: skip


@pytest.mark.parametrize("name", [plan.name for plan in PLANS if plan.name != "7b-searched"])
def test_reals_plans_are_configurations_whose_generation_is_priced(name: str) -> None:
    plan = plan_named(name)
    loaded = TrainConfig.model_validate(published_tree(plan))
    assert check_layouts(loaded, {name: read_hf_config(role) for name, role in named_roles(loaded).items()}) == []
    layouts = layout_tree(loaded)
    for role, call in (("actor", "ActorGen"), ("actor, trained", "ActorTrain"), ("critic, trained", "CriticTrain")):
        found = plan.call(call)
        assert layouts[role][1:] == [found.tp, found.pp, found.dp]
    network = Between(19e-6, 25e9, 1, published("a test"))
    cluster = Cluster(len(plan.call("ActorGen").nodes), 8, GPUS["h100"], INSIDE["h100"], network)
    told = {True: (plan.call("ActorGen").seconds, plan.wall_s), False: (plan.no_graph_s, plan.no_graph_wall_s)}
    for captured, (seconds, wall_s) in told.items():
        rows = Prices(loaded, cluster, Decoding(1024, [1024] * plan.batch, captured)).rows()
        assert rows["actor", "prompts"] + rows["actor", "decode"] == pytest.approx(seconds, rel=0.09)
        assert 0.8 < sum(rows.values()) / wall_s < 1.0


# Algorithm 1 of ReaL: by clocks of devices, beside the paper's own formulation


def by_last_of_mesh(
    calls: Sequence[Call], meshes: Sequence[frozenset[int]], newer: Callable[[Span, Span, Span], bool]
) -> dict[str, Span]:
    """Algorithm 1 as printed; `newer(other, own, new)`: the new call, after `own` on its mesh, replaces `other` as last."""
    spans: dict[str, Span] = {}
    last = {mesh: Span(0, 0) for mesh in {*meshes, *(call.devices for call in calls)}}
    queue = [(0, number) for number, call in enumerate(calls) if not call.parents]
    done: set[str] = set()
    while queue:
        ready, number = heapq.heappop(queue)
        call, own = calls[number], last[calls[number].devices]
        start = max(ready, own.end_ns)
        span = spans[call.name] = Span(start, start + call.duration_ns)
        last = {mesh: span if mesh & call.devices and newer(other, own, span) else other for mesh, other in last.items()}
        done.add(call.name)
        for child, other in enumerate(calls):
            if call.name in other.parents and done >= set(other.parents):
                heapq.heappush(queue, (max(spans[parent].end_ns for parent in other.parents), child))
    return spans


@st.composite
def graphs(draw: st.DrawFn) -> list[Call]:
    calls = []
    for number in range(draw(st.integers(1, 8))):
        devices = draw(st.frozensets(st.integers(0, DEVICES - 1), min_size=1))
        parents = draw(st.lists(st.sampled_from(range(number)), unique=True, max_size=3)) if number else []
        calls.append(Call(f"c{number}", devices, draw(st.integers(0, 9)), tuple(f"c{parent}" for parent in parents)))
    return calls


@given(graphs())
def test_clocks_of_devices_equal_the_last_of_every_mesh(calls: list[Call]) -> None:
    meshes = [frozenset(mesh) for size in range(1, DEVICES + 1) for mesh in combinations(range(DEVICES), size)]
    spans = play(calls)
    assert spans == by_last_of_mesh(calls, meshes, lambda other, own, new: other.end_ns <= new.end_ns)
    check(calls, spans)


def test_published_seconds_give_the_published_plans() -> None:
    played = {plan.name: step_s(plan, Costs.printed(plan)) for plan in PLANS}
    expected = {"70b-searched": 360.7, "70b-heuristic": 529.5, "7b-searched": 57.1, "7b-heuristic": 114.9}
    assert played == pytest.approx(expected, abs=0.05)
    without = {plan.name: step_s(plan, Costs.printed(plan, graphs=False)) for plan in PLANS}
    expected = {"70b-searched": 525.0, "70b-heuristic": 895.0, "7b-searched": 75.3, "7b-heuristic": 175.3}
    assert without == pytest.approx(expected, abs=0.05)
    assert {plan.name: steady_step_s(plan, Costs.printed(plan)) for plan in PLANS} == pytest.approx(played)


def test_the_order_of_ties_decides_and_the_guard_as_printed_overlaps_two_calls() -> None:
    plan = plan_named("7b-searched")
    costs = Costs.printed(plan)
    orders = tie_orders(plan, costs)
    assert sorted(orders.values()) == pytest.approx([57.1] * 4 + [63.1] * 2)
    slower = {order for order, seconds in orders.items() if seconds > 60}
    assert slower == {("RewInf", "CriticInf", "RefInf"), ("RefInf", "CriticInf", "RewInf")}
    for each in PLANS:
        assert each is plan or len(set(tie_orders(each, Costs.printed(each)).values())) == 1
    calls = step_calls(plan, costs)
    meshes = [frozenset({1}), frozenset({2}), frozenset({1, 2})]
    spans = by_last_of_mesh(calls, meshes, lambda other, own, new: other.end_ns <= own.end_ns)
    assert makespan_ns(spans) == nanoseconds(55.1)
    with pytest.raises(ScheduleError, match=r"CriticInf begins on device 2 at 22\.3 s, while RefInf runs there until 24\.3"):
        check(calls, spans)


def test_a_period_counts_what_iterations_share() -> None:
    """Two devices in turn: alone, an iteration takes 5; beside its neighbours, as long as the busier device."""
    calls = [Call("a", frozenset({0}), 2), Call("b", frozenset({1}), 3, ("a",))]
    assert makespan_ns(play(calls)) == 5
    assert (period_ns(calls, []), period_ns(calls, [Carried("a", "b")])) == (3, 5)
    assert makespan_ns(play(iterations(calls, [], 4))) == 2 + 4 * 3
