"""Every feature in every layout trains as one process without overlap does, to rounding, and resumes to the bit."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.schedule.rounds import FAN_OUT
from oppo_megatron.schedule.weaving.costs import Costs, read_costs
from oppo_megatron.token_text import StepEnds
from tests.e2e.matrix import DIVIDED, FEATURES, FEW_ROUNDS, LAYOUTS, OPTIONS, WIDE, Matrix, calls_of, carries, option_of, run_dir
from tests.e2e.rewards import brevity
from tests.e2e.started import struck
from tests.e2e.test_resume import assert_bit_equal, checkpoints, last_checkpoint, resumed, stop
from tests.replay.runs import assert_replays, carrying, save_models
from tests.support.configs import run_of
from tests.support.ppo import WITHOUT_CRITIC, Outcome, Workspace, assert_same, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tests.support.virtual import assert_unfolds_alike

FACTORS = {"mode": ("colocated", "disaggregated")} | {
    f"{side} {what}": values
    for side in ("actor", "scorer")
    for what, values in (("tp", (1, 2)), ("pp", (1, 2, 4)), ("dp", (1, 2)))
}
SOON = ("greedy baseline, carried", "prompts fork")


def pairs() -> list[Any]:
    found = []
    for name, feature in FEATURES.items():
        for layout in LAYOUTS | (WIDE if name == "plain" else DIVIDED if name.startswith(("experts", "GPT-OSS")) else {}):
            found.append(pytest.param(name, layout, marks=[] if layout in feature.soon else [pytest.mark.long]))
    return found


@pytest.mark.parametrize(("feature", "layout"), pairs())
def test_a_feature_in_a_layout_trains_as_one_process(matrix: Matrix, feature: str, layout: str) -> None:
    plain, config = matrix.reference(feature), matrix.in_layout(feature, layout, option_of(feature, layout))
    outcome = matrix.run(config)
    assert_same(outcome, plain)
    FEATURES[feature].also(outcome, plain)
    if "filter" not in feature:  # whose verdicts no simulation knows
        assert_unfolds_alike(config, outcome)
    assert_memory_of_every_rank(config)


@pytest.mark.parametrize("feature", [each if each in SOON else pytest.param(each, marks=pytest.mark.long) for each in FEATURES])
def test_stopped_within_rollouts_and_resumed_is_the_run_that_never_stopped(matrix: Matrix, feature: str) -> None:
    layout = FEATURES[feature].stops
    option = option_of(feature, layout)
    option = 0 if OPTIONS[option] in FEW_ROUNDS else option
    option = 1 if FEATURES[feature].shows is carries else option  # else its first step has hardly a round
    whole, config = (matrix.in_layout(feature, layout, option, name) for name in ("", "stopped"))
    plain = matrix.run(whole)
    assert_same(plain, matrix.reference(feature))
    stop(config, rounds=FEATURES[feature].rounds, rank=int(layout != "1 | 1"))
    assert "clock" in checkpoints(config)[-1]
    if config["rollout"].get("group_size", 1) > 2:
        ended: dict[int, set[bool]] = {}
        for row in map(json.loads, (last_checkpoint(config) / "rollouts.jsonl").read_text().splitlines()):
            ended.setdefault(row["seq_id"] // config["rollout"]["group_size"], set()).add(row["finish_clock"] is not None)
        assert {True, False} in ended.values(), "stopped within a group"
    config["checkpoint"] = {"resume": True}
    stop(config, rounds=4)
    assert_bit_equal(resumed(config), plain)
    if feature == "filter":
        once, again = (Counter(calls_of(each).read_text().splitlines()) for each in (whole, config))
        assert once == again


def test_layouts_cover_every_pair_of_choices() -> None:
    places = [each["placement"] for each in (LAYOUTS | WIDE).values() if "scorer" in each["placement"]]
    rows = [{name: place[name.split()[0]] for name in FACTORS} for place in places]
    rows = [{n: v if n == "mode" else v[n.split()[1]] for n, v in row.items()} for row in rows]
    for one, other in combinations(FACTORS, 2):
        assert {(row[one], row[other]) for row in rows} == set(product(FACTORS[one], FACTORS[other])), (one, other)


def assert_memory_of_every_rank(config: dict[str, Any]) -> None:
    summary = json.loads((run_dir(config) / "summary.json").read_text())
    base, peak, planned, ratio = (summary[f"memory_{name}"] for name in ("base_mb", "peak_mb", "planned_mb", "ratio"))
    ranks = world_size(run_of(config))
    assert len(base) == len(peak) == len(planned) == len(ratio) == ranks
    for rank in range(ranks):
        assert peak[rank] >= base[rank] > 0 < planned[rank], rank  # this process may have held more before
        assert ratio[rank] == pytest.approx((peak[rank] - base[rank]) / planned[rank], rel=0.05, abs=2e-2)
    peaks = [line["memory_peak_mb"] for line in read_metrics(run_dir(config) / "metrics.jsonl")]
    for before, after in pairwise([*peaks, peak]):
        assert all(one <= other for one, other in zip(before, after, strict=True))


DISAGGREGATED = {"mode": "disaggregated"}
STREAMED = {"overlap.intra": True}


@pytest.fixture
def plain(matrix: Matrix) -> Outcome:
    return matrix.reference("plain")


@pytest.mark.parametrize("feature", ["plain", "process rewards"])
def test_disaggregated_sequential_is_bit_equal_to_one_process(matrix: Matrix, feature: str) -> None:
    plain, config = matrix.reference(feature), matrix.in_layout(feature, "1 | 1", name="sequential")
    config["overlap"]["intra"] = False
    outcome = run_ppo_ranks(config)
    assert_same(outcome, plain)
    assert weight_distance(outcome.actor, plain.actor) == weight_distance(outcome.critic, plain.critic) == 0.0
    assert [row["reward"] for row in outcome.rollouts] == [row["reward"] for row in plain.rollouts]
    costs = read_costs(RunDirectory(config["run_dir"]).costs, role_placements(run_of(config)))
    built_in = Costs()
    assert costs.decode_at(0) != built_in.decode_at(0) and costs.sample != built_in.sample and costs.score != built_in.score
    assert set(costs.prefill) == {"actor", "reference", "critic", "reward"}
    assert built_in.default_prefill not in {costs.prefill_at(role, 0) for role in costs.prefill}


@pytest.mark.parametrize(
    ("actor", "scorer"), [({}, {"dp": 3}), pytest.param({"pp": 2, "dp": 2}, {"pp": 2, "dp": 3}, marks=pytest.mark.long)],
    ids=["1 | DP3", "PP2xDP2 | PP2xDP3"],
)  # fmt: skip
def test_chunks_from_many_ranks_train_to_the_bit_as_those_from_one(
    workspace: Workspace, plain: Outcome, actor: dict[str, int], scorer: dict[str, int]
) -> None:
    outcomes = []
    for fan_out in (FAN_OUT, 1):
        name = f"fan-out-{fan_out}-{len(actor)}"
        config = deep(workspace, name, placement=DISAGGREGATED | {"actor": actor, "scorer": scorer}, **STREAMED)
        world = world_size(run_of(config))
        run_ranks(world, "tests.e2e.jobs:train_with_fan_out", config=config, fan_out=fan_out)
        outcomes.append(read_outcome(run_dir(config)))
    one, many = outcomes
    assert_same(many, plain)
    assert many.rollouts == one.rollouts
    assert weight_distance(many.actor, one.actor) == weight_distance(many.critic, one.critic) == 0.0


def test_a_small_cache_changes_nothing_but_order(workspace: Workspace, plain: Outcome) -> None:
    slot_mb = 2 * 4 * 2 * (96 + 40) * 8 * 4 / 2**20  # k and v, layers, kv heads, positions, head dimension, bytes
    cache = {"runtime.kv_cache_mb": 2.5 * slot_mb}
    outcome = run_ppo_ranks(deep(workspace, "small-cache", placement=DISAGGREGATED, **STREAMED, **cache))
    first = [row["seq_id"] for row in plain.rollouts if row["step"] == 1]
    assert {i: outcome.tokens()[i] for i in first} == {i: plain.tokens()[i] for i in first}
    assert sorted(outcome.tokens()) == sorted(plain.tokens())
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4


def test_weights_load_in_transformers(matrix: Matrix, plain: Outcome) -> None:
    weights = run_dir(matrix.config("plain", "reference", {})) / "weights"
    actor = AutoModelForCausalLM.from_pretrained(weights / "actor")
    assert float((actor.state_dict()["model.norm.weight"] - plain.actor["model.norm.weight"]).abs().max()) == 0.0
    assert AutoModelForSequenceClassification.from_pretrained(weights / "critic").config.num_labels == 1


def test_a_tuned_chunk_is_the_same_for_scorers_partly_on_the_actors_ranks(workspace: Workspace, plain: Outcome) -> None:
    """The reward model's stages are on a rank that decodes and on one that does not: both plan its rounds."""
    chunk = {"overlap.chunk": [7, 20], "runtime.timeout_s": 60.0}
    config = deep(workspace, "partly", placement=DISAGGREGATED | {"actor": {"pp": 2}}, **STREAMED, **chunk)
    config["reward"] |= {"ranks": "1-2", "parallel": {"pp": 2}}
    planned = run_ranks(3, "tests.e2e.jobs:train_and_tell_chunks", config=config)
    assert planned[0] == planned[1] == planned[2] and set(planned[0]) == {7, 20}, "by round, on each rank"
    outcome = read_outcome(Path(config["run_dir"]))
    assert [line["chunk_tokens"] for line in outcome.metrics] == [7, 7, 20], "a search has tried another size"
    assert_same(outcome, plain)


@pytest.mark.parametrize(("name", "generate", "train", "moves"), [
    pytest.param("pp2-tp2", {"pp": 2}, {"tp": 2, "pp": 1}, True, marks=pytest.mark.long),
    pytest.param("tp2-dp2", {"tp": 2}, {"tp": 1, "dp": 2}, False, marks=pytest.mark.long),
    pytest.param("dp4-tp2-pp2", {"dp": 4}, {"tp": 2, "pp": 2, "dp": 1}, True, marks=pytest.mark.long),
    ("tp2-vpp2", {"tp": 2}, {"tp": 1, "pp": 2, "vpp": 2}, True),
    pytest.param("pp2-vpp2", {"pp": 2}, {"vpp": 2}, True, marks=pytest.mark.long),
    pytest.param("tp2-sp", {"tp": 2}, {"sequence_parallel": True}, False, marks=pytest.mark.long),
    pytest.param("pp2-full", {"pp": 2}, {"recompute": "full"}, False, marks=pytest.mark.long),
])  # fmt: skip
def test_updates_may_have_another_layout_than_decoding(
    workspace: Workspace, plain: Outcome, name: str, generate: dict[str, int], train: dict[str, Any], moves: bool
) -> None:
    """`moves`: whether weights have to cross between ranks; to decode a shard of what it trains, a rank needs no other."""
    config = deep(workspace, name, placement={"mode": "colocated", "actor": generate}, **STREAMED)
    config["actor"]["train"] = config["critic"]["train"] = train
    outcome = run_ppo_ranks(config)
    assert_same(outcome, plain)
    moved = {line["reallocated_bytes"] for line in outcome.metrics}
    assert (max(moved) > 0) == moves and len(moved) == 1
    assert all(line["reallocate_s"] < line["train_s"] for line in outcome.metrics)


FORK = FEATURES["prompts fork"].changes


@pytest.mark.long
def test_stale_caches_that_are_kept_fork(matrix: Matrix) -> None:
    kept = FORK | {"overlap.carry": "keep"}
    changed = {name: kept | {"overlap.without": without} for name, without in (("forked", []), ("apart", ["fork"]))}
    forked, apart = (run_ppo_ranks(matrix.config("fork-kept", name, changes)) for name, changes in changed.items())
    assert_same(forked, apart)
    assert min(line["forked_tokens"] for line in forked.metrics) > 0


@pytest.mark.long
@pytest.mark.parametrize("placement", [None, {"mode": "single"}], ids=["with caches", "without caches"])
def test_a_run_killed_within_groups_resumes_with_and_without_caches(matrix: Matrix, placement: dict[str, str] | None) -> None:
    config = matrix.in_layout("prompts fork", "PP2 | TP2", name=f"killed-{placement is None}")
    config["checkpoint"] = {"every_steps": 1}
    struck(config, "round", 1, "killed")
    config["placement"] = placement or config["placement"]
    config["checkpoint"]["resume"] = True
    outcome = run_ppo_ranks(config)
    assert_same(outcome, matrix.reference("prompts fork"))
    assert min(line["forked_tokens"] for line in outcome.metrics) > 0


SEPARATOR = "\n"


def parts(how: str) -> list[dict[str, Any]]:
    return [
        {"kind": "process", "step_rewards": how, "separator": SEPARATOR, "weight": 2.0},
        {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 100}, "weight": 0.1},
    ]


@pytest.fixture(scope="module")
def workspace(workspace: Workspace) -> Workspace:
    save_models(workspace.root)
    return workspace


class Reference:
    """A process reward model in transformers, one whole sequence at a time."""

    def __init__(self, workspace: Workspace):
        directory = workspace.root / "reward"
        self.model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = load_tokenizer(TokenizerConfig(path=workspace.root / "tokenizer.model"))

    def scores(self, row: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        prompt = self.tokenizer.encode(row["prompt"])
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([[*prompt, *row["tokens"]]])).last_hidden_state
            logits = self.model.score(hidden)[0, len(prompt) :, 0]
        ends = StepEnds(SEPARATOR, self.tokenizer.decode).of(row["tokens"])
        return ends, logits[ends].sigmoid().tolist()


@pytest.mark.parametrize("how", ["sum", "potential"])
def test_a_run_over_step_rewards_is_what_a_loop_of_its_own_makes_of_them(workspace: Workspace, how: str) -> None:
    changes = {"rewards": parts(how), "placement": {"mode": "disaggregated"}, "steps": 3}
    rollout = {"batch_size": 12, "max_response_tokens": 40}
    config = carrying(workspace, f"parity-{how}", WITHOUT_CRITIC | changes | {"rollout": rollout})
    run, reference = run_ppo_ranks(config), Reference(workspace)
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some rollouts should be carried"
    num_steps = [len(reference.scores(row)[0]) for row in run.rollouts]
    assert max(num_steps) > 2 and sum(count > 1 for count in num_steps) > 2

    def rewards_of(row: Mapping[str, Any]) -> list[float]:
        ends, scores = reference.scores(row)
        found = [0.0] * len(row["tokens"])
        for end, now, before in zip(ends, scores, [0.0, *scores], strict=False):
            found[end] += 2.0 * (now if how == "sum" else now - before)
        found[-1] += 0.1 * brevity("", row["response"], {}, 100)
        assert sum(found) == pytest.approx(row["reward"], abs=1e-5), "the response's reward is that of its steps"
        return found

    assert_replays(config, token_rewards=rewards_of)


@pytest.mark.long
@pytest.mark.parametrize("how", ["last", "min", "sum"])
def test_scores_of_a_part_are_those_of_the_whole_forward(workspace: Workspace, how: str) -> None:
    heldout = {"path": str(workspace.root / "data" / "prompts.jsonl"), "max_prompt_tokens": 96, "max_rows": 6}
    changes = {
        "rewards": parts(how), "steps": 1, "placement": {"mode": "disaggregated", "scorer": {"pp": 2, "dp": 2}},
        "evaluation": {"data": heldout, "metrics": parts(how)[:1], "temperature": 1.0},
    }  # fmt: skip
    run, reference = run_ppo_ranks(carrying(workspace, f"heldout-{how}", changes)), Reference(workspace)
    value_of = {"last": lambda p: p[-1], "min": min, "sum": sum}[how]
    for row in run.rollouts:
        trained = 2.0 * value_of(reference.scores(row)[1]) + 0.1 * brevity("", row["response"], {}, 100)
        assert row["reward"] == pytest.approx(trained, abs=1e-4)


ROOT = Path(__file__).resolve().parents[2]
SETS = {
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AUTO,STRICT",  # as a run sets on a processor without AVX-512
    },
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}  # fmt: skip
"""By torch's own name of what ATen then uses; the last one is the least that torch runs on."""
TELLING = [
    "tests/unit/test_algorithms_preferences.py", "tests/unit/test_algorithms_losses.py", "tests/gloo/test_losses.py",
    "tests/gloo/test_training.py::test_steps_equal_plain_torch", "tests/parity/test_hf_logits.py::test_logits_equal_transformers",
    "tests/e2e/test_matrix.py::test_a_feature_in_a_layout_trains_as_one_process",
    "tests/e2e/test_matrix.py::test_stopped_within_rollouts_and_resumed_is_the_run_that_never_stopped", "tests/replay",
    "tests/e2e/test_groups.py::test_rounding_takes_no_gradient_from_ratios_of_responses", "tests/gloo/test_precision.py",
    "tests/e2e/test_bfloat16.py::test_a_run_is_near_float32s_and_leaves_bfloat16", "tests/parity/test_hf_roundtrip.py",
]  # fmt: skip


def under(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", [*SETS, "two threads"])
def test_telling_tests_pass(name: str, tmp_path: Path) -> None:
    environment = SETS.get(name, {"OMP_NUM_THREADS": "2"})
    if name in SETS:
        if platform.machine() != "x86_64":
            pytest.skip(f"no such instructions on {platform.machine()}")
        asked = "import torch; print(torch.backends.cpu.get_cpu_capability())"
        assert under(environment, "-c", asked).strip() == name
    pytest_run = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", f"--basetemp={tmp_path / 'tests'}")
    assert " passed" in under(environment, *pytest_run, *TELLING)
