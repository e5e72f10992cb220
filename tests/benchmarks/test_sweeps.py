"""`benchmarks.sweeps`: the runs of each kind, their arithmetic on made-up metrics, and each kind on tiny runs."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling, sweeps
from oppo_megatron.bench.suite import Run, Suite, bare
from oppo_megatron.cli.launch import launch
from oppo_megatron.config.derived import max_context
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.modeldir.headers import read_hf_config
from tests.support.ppo import Workspace
from tests.unit.test_bench_suite import SHAPE, line, runs_of
from tests.unit.test_bench_suite import config as with_critic
from tests.unit.test_bench_suite import without_critic as config

Make = Callable[..., sweeps.Configs]


@pytest.fixture
def configs_of(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(kind: str, base: TrainConfig, *options: str) -> sweeps.Configs:
        monkeypatch.setattr(sweeps, "load_base", lambda args, inputs="": base)
        parser = argparse.ArgumentParser()
        sweeps.add_arguments(parser)
        return sweeps.KINDS[kind].configs(parser.parse_args([kind, "c.yaml", *options]))

    return make


def test_chunk_sizes_within_the_limit_and_the_tuner_as_configured(configs_of: Make) -> None:
    base = with_critic(overlap={"chunk": [32, 4, 8]})
    configs = configs_of("chunk", base, "--sizes", "8,64,128")
    assert list(configs) == ["8", "64", "adaptive"], "128 is beyond the limit"
    assert configs["8"].overlap.chunk == 8
    assert configs["adaptive"].overlap.chunk == base.overlap.chunk
    assert configs_of("chunk", with_critic(overlap={"chunk": 32}))["adaptive"].overlap.chunk == [32, 16, 64]


@pytest.mark.parametrize("sizes", [[32, 16, 64], [48, 16, 32, 64], [32, 64, 200], [32]])
def test_the_first_settled_step_is_that_of_the_tuner(sizes: list[int]) -> None:
    longest = 100
    tuner, seen = ChunkTuner(sizes, longest), []
    costs = {16: 3.0, 32: 2.0, 48: 5.0, 64: 1.0, 100: 4.0}
    for step in range(1, 20):
        seen.append(tuner.value)
        tuner.observe(step, StepCost(costs[tuner.value], steps=1, tokens=1))
    first = sweeps.first_settled_step(sizes, longest)
    assert len(set(seen[first - 1 :])) == 1, "nothing is tried from there on"
    assert seen[first - 1] == min({min(size, longest) for size in sizes}, key=lambda size: costs[size])


def test_the_tuner_is_compared_over_the_same_steps(configs_of: Make) -> None:
    base = with_critic(overlap={"chunk": [32, 16]})  # settles in step 4
    runs = {
        "16": runs_of([9.0, 1.0, 1.0, 4.0, 4.0]), "32": runs_of([9.0, 5.0, 5.0, 2.0, 3.0]),
        "adaptive": [Run(Path("run"), [line(n, 3.0, chunk_tokens=16) for n in range(1, 6)])],
    }  # fmt: skip
    configs = configs_of("chunk", base, "--sizes", "16,32")
    result, lines = sweeps.chunk_result(configs, runs)
    found = result["adaptive"]
    assert found["first_settled_step"] == 4 and found["settled_on"] == [16]
    assert found["best_fixed"] == 32 and found["best_fixed_step_s"] == 2.5, "of steps 4 and 5 alone"
    assert found["fixed_step_s"] == {"16": 4.0, "32": 2.5}
    assert found["percent"] == pytest.approx(20.0) and found["choice_percent"] == pytest.approx(60.0)
    assert "+20.0 % of the best fixed size, 32" in lines[0]
    rows = {row["chunk"]: row for row in result["results"]}
    assert rows["16"]["step_s"] == 2.5 and rows["32"]["step_s"] == 4.0 and rows["32"]["over_best"] == 1.6

    short = {name: [Run(Path("run"), turns[0].lines[:3])] for name, turns in runs.items()}
    assert "give more --steps" in sweeps.chunk_result(configs, short)[1][0]


def test_ranks_limits_and_batches_take_what_depends_on_them_along() -> None:
    pair = with_critic()
    assert [world_size(scaling.with_ranks(pair, n)) for n in (1, 2, 4)] == [1, 2, 4]
    placements = role_placements(scaling.with_ranks(pair, 4))
    assert placements["actor"].layout == (1, 1, 3) and placements["critic"].ranks == (3,)
    colocated = scaling.with_ranks(with_critic(placement={"mode": "colocated"}), 4)
    assert role_placements(colocated)["actor"] == role_placements(colocated)["critic"] and world_size(colocated) == 4
    assert all(scaling.with_ranks(pair, n).runtime.threads_per_rank == 1 for n in (1, 2))
    longer = scaling.with_limit(with_critic(runtime={"micro_batch_tokens": 128}), 256)
    assert longer.rollout.max_response_tokens == 256 and longer.rollout.forced_lengths == [64.0, 1.0]
    assert longer.runtime.micro_batch_tokens == 320
    assert read_hf_config(longer.critic)["max_position_embeddings"] == 320
    smaller = scaling.with_batch(with_critic(overlap={"delta": {"initial": 4, "max": 8}}), 4)
    assert (smaller.rollout.batch_size, smaller.overlap.delta.initial, smaller.overlap.delta.max) == (4, 1, 2)
    assert not list(smaller.overlap.rules(4))


def test_scaled_models_are_models() -> None:
    for factor in (0.1, 0.5, 0.75, 1.0, 1.5, 2.0):
        changed = scaling.with_model(with_critic(), factor)
        for role in (changed.actor, changed.critic, changed.reward):
            assert check_shape("role", read_hf_config(role), changed.placement.actor, max_context(changed), 288) == []
        shape = read_hf_config(changed.actor)
        assert shape["hidden_size"] // shape["num_attention_heads"] == 8, "heads keep their size"
        if factor in (0.5, 1.0, 1.5, 2.0):
            scaled = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
            assert all(shape[name] == SHAPE[name] * factor for name in scaled)
    with pytest.raises(ConfigError, match="critic.checkpoint is given"):
        scaling.with_model(with_critic(critic={"checkpoint": "c"}), 2.0)


def test_what_a_kind_needs(configs_of: Make) -> None:
    alone = config("reinforce_pp", rollout={"batch_size": 64, "group_size": 1, "max_response_tokens": 16})
    for kind, base, options, problem in (
        ("chunk", with_critic(), ["--sizes", "128"], "none is within rollout.max_response_tokens 64"),
        ("chunk", with_critic(overlap={"intra": False}), [], "overlap.intra is false"),
        ("chunk", config("dapo"), [], "no reference, critic or reward model, so the chunk size has no effect"),
        ("delta", with_critic(overlap={"inter": False}), [], "overlap.inter=true"),
        ("delta", with_critic(), ["--rules", "fixed"], "--rules names fixed"),
        ("fork", alone, [], "rollout.group_size is 1, so no cache is forked"),
        ("weave", config("dapo"), [], "no reference, critic or reward model, so no scoring can be woven"),
        ("rewards", config("grpo"), ["--rewards", "model,judge"], "--rewards names judge; choose from verifier, model, process"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            configs_of(kind, base, *options)


LENGTHS = {"rollout.forced_lengths": [12, 0.7], "rollout.max_response_tokens": 24}
OVERLAPS = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}
GROUPS: dict[str, Any] = {
    "critic": None, "reward": None, "ppo": {"minibatches": 1}, "steps": 1,
    "rewards": [{"kind": "verifier", "name": "arithmetic"}], "rollout.batch_size": 8, "rollout.group_size": 4,
    "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1}, "algorithm": {"preset": "grpo"},
}  # fmt: skip
Sweep = Callable[..., dict[str, Any]]


@pytest.fixture
def swept(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    def run(kind: str, options: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
        own = {**LENGTHS, **OVERLAPS, "steps": 2, **changes}
        base = bare(TrainConfig(**workspace.config(f"sweep-{kind}", **own)))
        for script in (sweeps, scaling):
            monkeypatch.setattr(script, "load_base", lambda args, inputs="": base)
        monkeypatch.setattr(sweeps, "new_suite", lambda args: Suite(args.out, 1, launch, say=lambda _: None))
        assert sweeps.main([kind, "c.yaml", "--out", str(tmp_path / kind), *options]) == 0
        written: dict[str, Any] = json.loads((tmp_path / kind / f"{kind}.json").read_text())
        assert written["bench"] == kind and written["machine"]["usable_cores"] >= 1
        return written

    return run


@pytest.mark.long
def test_each_kind_runs(swept: Sweep) -> None:
    rows = swept("fork", ["--prompts", "16,20"], **GROUPS)["results"]
    assert [(row["prompt_tokens"], row["fork"]) for row in rows] == [(16, "yes"), (16, "no"), (20, "yes"), (20, "no")]
    for forked, apart in (rows[:2], rows[2:]):
        assert apart["forked_tokens"] == 0 < forked["forked_tokens"]
        assert forked["prefilled_tokens"] + forked["forked_tokens"] == apart["prefilled_tokens"]
        assert forked["speedup_step_s"] == pytest.approx(apart["step_s"] / forked["step_s"])

    written = swept("rewards", ["--rewards", "verifier,process", "--modes", "sequential,full"], **GROUPS)
    rows = [(row["reward"], row["mode"]) for row in written["results"]]
    assert rows == [(kind, mode) for kind in ("verifier", "process") for mode in ("sequential", "full")]
    assert all(row["best_step_s"] == row["speedup_step_s"] for row in written["results"]), "each kind has its own base"
    scored = {kind: found["results"][0]["score_busy_s"] for kind, found in written["rewards"].items()}
    assert min(scored.values()) > 0, "the reference reads under a verifier, too"

    rows = swept("weave", ["--modes", "sequential,woven"], placement={"mode": "colocated", "actor": {"pp": 2}})["results"]
    assert [row["mode"] for row in rows] == ["sequential", "woven"]
    for row in rows:
        assert 0 < row["rounds_s"] <= row["step_s"] and len(row["bubble_by_rank"]) == 2
        assert 0 < row["bubble_percent"] < 100

    written = swept("chunk", ["--sizes", "4,8,64"], steps=4, **{"overlap.chunk": [4, 8]})
    assert [row["chunk"] for row in written["results"]] == ["4", "8", "adaptive"]
    tuned = written["adaptive"]
    assert tuned["first_settled_step"] == 4 and tuned["settled_on"][0] in (4, 8) and tuned["best_fixed"] in (4, 8)
    assert {line["chunk_tokens"] for line in written["runs"]["8"][0]["steps"]} == {8}

    changes = {"overlap.delta": {"initial": 1, "max": 2, "window": 1}, "steps": 3}
    rows = {row["delta"]: row for row in swept("delta", ["--fixed", "0,2", "--rules", "eq4"], **changes)["results"]}
    assert rows["fixed-0"]["carried"] == 0 and rows["fixed-0"]["stale_percent"] == 0
    assert rows["fixed-0"]["ess"] == pytest.approx(1, abs=1e-6)
    assert rows["fixed-2"]["carried"] > 0 and rows["fixed-2"]["delta_last"] == [2]
    assert rows["eq4"]["delta_last"] != [1], "two rewards are enough for a window of 1"

    written = swept("scaling", ["--axis", "batch", "--factors", "0.5,1"], steps=1)
    rows = written["results"]
    assert [row["value"] for row in rows] == [4, 6], "whole minibatches"
    assert set(written["runs"]) == {f"batch/{size}/{mode}" for size in (4, 6) for mode in ("sequential", "full")}
    assert rows[1]["tokens_per_step"] > rows[0]["tokens_per_step"] and "sequential_growth" in rows[1]
