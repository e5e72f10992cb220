"""Overlap changes when things are computed, and nothing else.

One start, one seed, three PPO steps (12 optimizer steps).  Tokens must be the same; weights may differ by the rounding of
a chunked prefill against a whole one, as Adam amplifies it (its epsilon is set so that it does not amplify noise).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.schedule.rounds import FAN_OUT
from oppo_megatron.schedule.weaving.costs import Costs, read_costs
from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

DISAGGREGATED = {"mode": "disaggregated"}
FIXED_ZERO = {"rule": "fixed", "initial": 0, "max": 0}
CHUNKS = (1, 7, 64)
"""Tokens: one, some, and more than a response has."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("serial"))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Iterator[Outcome]:
    """Plain PPO in one process: no streaming, no overcommitment."""
    yield run_ppo_ranks(deep(workspace, "plain"))


def test_the_plain_run_is_worth_comparing_with(plain: Outcome) -> None:
    lengths = {len(row["tokens"]) for row in plain.rollouts}
    assert len(plain.rollouts) == 18 and len(lengths) > 4, "responses should end at different lengths"
    assert {row["finish_reason"] for row in plain.rollouts} == {"eos", "length"}


def test_disaggregated_sequential_is_bit_equal_to_one_process(workspace: Workspace, plain: Outcome) -> None:
    """And measures every kind of action, though each role reads a single micro-batch in a step."""
    config = deep(workspace, "sequential", placement=DISAGGREGATED)
    outcome = run_ppo_ranks(config)
    assert_same(outcome, plain)
    assert weight_distance(outcome.actor, plain.actor) == 0.0
    assert weight_distance(outcome.critic, plain.critic) == 0.0
    costs = read_costs(RunDirectory(config["run_dir"]).costs, role_placements(TrainConfig(**config)))
    built_in = Costs()
    assert costs.decode_at(0) != built_in.decode_at(0) and costs.sample != built_in.sample and costs.score != built_in.score
    assert set(costs.prefill) == {"actor", "reference", "critic", "reward"}
    assert built_in.default_prefill not in {costs.prefill_at(role, 0) for role in costs.prefill}


@pytest.mark.parametrize("placement", ["single", "disaggregated"])
@pytest.mark.parametrize(("inter", "chunk"), [*((False, chunk) for chunk in CHUNKS), (True, 7)])
def test_overlap_equals_plain_ppo(
    workspace: Workspace, plain: Outcome, placement: str, chunk: int, inter: bool
) -> None:
    """Intra-step overlap, and with `inter` both overlaps, of which delta 0 leaves nothing to the next step."""
    changes = {
        "overlap.intra": True,
        "overlap.inter": inter,
        "overlap.delta": FIXED_ZERO,
        "overlap.chunk.tokens": chunk,
    }
    config = deep(workspace, f"{placement}-{chunk}-{inter}", placement={"mode": placement}, **changes)
    assert_same(run_ppo_ranks(config), plain)


@pytest.mark.parametrize(
    ("actor", "scorer"),
    [
        pytest.param({"tp": 2}, {"pp": 2}, marks=pytest.mark.long),
        ({"pp": 2}, {"tp": 2}),
        pytest.param({"tp": 2, "pp": 2}, {}, marks=pytest.mark.long),
        ({}, {"tp": 2, "pp": 2}),
    ],
    ids=["TP2 | PP2", "PP2 | TP2", "TP2xPP2 | 1", "1 | TP2xPP2"],
)
def test_overlap_equals_plain_ppo_on_parallel_groups(
    workspace: Workspace, plain: Outcome, actor: dict[str, int], scorer: dict[str, int]
) -> None:
    placement = DISAGGREGATED | {"actor": actor, "scorer": scorer}
    name = f"parallel-{actor}-{scorer}".translate(str.maketrans("", "", "{}':, "))
    assert_same(run_ppo_ranks(deep(workspace, name, placement=placement, **{"overlap.intra": True})), plain)


@pytest.mark.parametrize(
    ("actor", "scorer"),
    [({}, {"dp": 3}), pytest.param({"pp": 2, "dp": 2}, {"pp": 2, "dp": 3}, marks=pytest.mark.long)],
    ids=["1 | DP3", "PP2xDP2 | PP2xDP3"],
)
def test_chunks_from_many_ranks_train_to_the_bit_as_those_from_one(
    workspace: Workspace, plain: Outcome, actor: dict[str, int], scorer: dict[str, int]
) -> None:
    """Several of the actor's ranks send, and listeners pass on, where each sends to a single one."""
    outcomes = []
    for fan_out in (FAN_OUT, 1):
        name = f"fan-out-{fan_out}-{len(actor)}"
        config = deep(workspace, name, placement=DISAGGREGATED | {"actor": actor, "scorer": scorer}, **{"overlap.intra": True})
        world = world_size(TrainConfig(**config))
        run_ranks(world, "tests.e2e.jobs:train_with_fan_out", config=config, fan_out=fan_out)
        outcomes.append(read_outcome(Path(config["run_dir"])))
    one, many = outcomes
    assert_same(many, plain)
    assert many.rollouts == one.rollouts
    assert weight_distance(many.actor, one.actor) == weight_distance(many.critic, one.critic) == 0.0


def test_module_path_decodes_the_same(workspace: Workspace, plain: Outcome) -> None:
    assert_same(run_ppo_ranks(deep(workspace, "module", **{"runtime.decode_path": "module"})), plain)


@pytest.mark.parametrize("mode", ["single", "disaggregated"])
def test_tokens_that_stay_on_the_device_and_paged_caches_train_the_same(
    workspace: Workspace, plain: Outcome, mode: str
) -> None:
    device = {"runtime.decode_sync_steps": 5, "runtime.kv_layout": "paged", "overlap.intra": True}
    assert_same(run_ppo_ranks(deep(workspace, f"device-{mode}", placement={"mode": mode}, **device)), plain)


def test_a_small_cache_changes_nothing_but_order(workspace: Workspace, plain: Outcome) -> None:
    """Slots for two or three sequences at a time: the others wait their turn, and scorers evict and prefill again."""
    slot_mb = 2 * 4 * 2 * (96 + 40) * 8 * 4 / 2**20  # k and v, layers, kv heads, positions, head dimension, bytes
    config = deep(
        workspace,
        "small-cache",
        placement=DISAGGREGATED,
        **{"overlap.intra": True, "runtime.kv_cache_mb": 2.5 * slot_mb},
    )
    outcome = run_ppo_ranks(config)
    first = [row["seq_id"] for row in plain.rollouts if row["step"] == 1]
    assert {i: outcome.tokens()[i] for i in first} == {i: plain.tokens()[i] for i in first}
    assert sorted(outcome.tokens()) == sorted(plain.tokens())
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4


def test_weights_load_in_transformers(workspace: Workspace, plain: Outcome) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    weights = Path(deep(workspace, "plain")["run_dir"]) / "weights"
    actor = AutoModelForCausalLM.from_pretrained(weights / "actor")
    assert float((actor.state_dict()["model.norm.weight"] - plain.actor["model.norm.weight"]).abs().max()) == 0.0
    assert AutoModelForSequenceClassification.from_pretrained(weights / "critic").config.num_labels == 1
