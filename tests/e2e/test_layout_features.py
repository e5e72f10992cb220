"""Layouts beyond the matrix's: ranks and layouts of single roles, fan-out, small caches; against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.schedule.rounds import FAN_OUT
from oppo_megatron.schedule.weaving.costs import Costs, read_costs
from tests.e2e.matrix import FEATURES, Matrix, run_dir
from tests.e2e.started import struck
from tests.support.configs import run_of
from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

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
    ("actor", "scorer"),
    [({}, {"dp": 3}), pytest.param({"pp": 2, "dp": 2}, {"pp": 2, "dp": 3}, marks=pytest.mark.long)],
    ids=["1 | DP3", "PP2xDP2 | PP2xDP3"],
)
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


@pytest.mark.parametrize(
    ("name", "generate", "train", "moves"),
    [
        ("pp2-tp2", {"pp": 2}, {"tp": 2, "pp": 1}, True),
        pytest.param("tp2-dp2", {"tp": 2}, {"tp": 1, "dp": 2}, False, marks=pytest.mark.long),
        pytest.param("dp4-tp2-pp2", {"dp": 4}, {"tp": 2, "pp": 2, "dp": 1}, True, marks=pytest.mark.long),
        ("tp2-vpp2", {"tp": 2}, {"tp": 1, "pp": 2, "vpp": 2}, True),
        pytest.param("pp2-vpp2", {"pp": 2}, {"vpp": 2}, True, marks=pytest.mark.long),
        pytest.param("tp2-sp", {"tp": 2}, {"sequence_parallel": True}, False, marks=pytest.mark.long),
        pytest.param("pp2-full", {"pp": 2}, {"recompute": "full"}, False, marks=pytest.mark.long),
    ],
)
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
    kept = FORK | {"overlap.actor_kv": "keep"}
    changed = {name: kept | {"overlap.without": without} for name, without in (("forked", []), ("apart", ["fork"]))}
    forked, apart = (run_ppo_ranks(matrix.config("fork-kept", name, changes)) for name, changes in changed.items())
    assert_same(forked, apart)
    assert min(line["forked_tokens"] for line in forked.metrics) > 0


@pytest.mark.long
@pytest.mark.parametrize("placement", [None, {"mode": "single"}], ids=["with caches", "without caches"])
def test_a_run_killed_within_groups_is_resumed_with_and_without_their_caches(
    matrix: Matrix, placement: dict[str, str] | None
) -> None:
    config = matrix.in_layout("prompts fork", "PP2 | TP2", name=f"killed-{placement is None}")
    config["checkpoint"] = {"every_steps": 1}
    struck(config, "round", 1, "killed")
    config["placement"] = placement or config["placement"]
    config["checkpoint"]["resume"] = True
    outcome = run_ppo_ranks(config)
    assert_same(outcome, matrix.reference("prompts fork"))
    assert min(line["forked_tokens"] for line in outcome.metrics) > 0
