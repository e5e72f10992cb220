"""Benchmarks of configurations without a critic, a reference or a reward model: each works, or says what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.bench.dry_run import DryRun
from oppo_megatron.bench.fork import bench_fork
from oppo_megatron.bench.limit import Response, least_seconds
from oppo_megatron.bench.overhead import remarks
from oppo_megatron.bench.overlap import known_modes, placed
from oppo_megatron.bench.peaks import Peaks
from oppo_megatron.bench.rewards import REWARDS, rewarded
from oppo_megatron.bench.scaling import make_axes, with_batch
from oppo_megatron.bench.suite import Suite
from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.main import main
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.modes import MODES
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.preflight.validate import train_problems

SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 288, "max_position_embeddings": 128,
}  # fmt: skip
PEAKS = Peaks("float32", {1: 1e9}, {1: 1e9}, {1: {1: 1e9, 8: 1e9}})


def config(preset: str, **changes: Any) -> TrainConfig:
    """64 responses in groups of 8, scored by a rule."""
    plain: dict[str, Any] = {
        "run_dir": "runs/x", "algorithm": {"preset": preset}, "steps": 3,
        "tokenizer": {"path": "t.model"}, "data": {"path": "p.jsonl", "max_prompt_tokens": 16},
        "actor": {"init": SHAPE}, "rewards": [{"kind": "verifier", "name": "arithmetic"}],
        "rollout": {"batch_size": 64, "group_size": 8, "max_response_tokens": 16},
        "ppo": {"minibatches": 4}, "overlap": {"delta": {"initial": 2, "max": 2}}, "debug": {"forced_lengths": [4, 0.5]},
    }  # fmt: skip
    return TrainConfig.model_validate(plain | changes)


def faults(config: TrainConfig) -> list[str]:
    """What is wrong but for the files that are not there."""
    return [problem for problem in train_problems(config) if "does not exist" not in problem]


def test_the_least_time_counts_the_scorers_that_there_are() -> None:
    responses = [Response(5, 7, 7), Response(6, 4, 9)]
    found = {name: least_seconds(config(name), responses, PEAKS, 1) for name in ("dapo", "grpo")}
    assert found["dapo"]["score_s"] == 0 < found["grpo"]["score_s"]
    for name in found:
        assert found[name]["train_s"] > 0
        assert found[name]["least_s"] == pytest.approx(
            sum(found[name][key] for key in ("decode_s", "score_s", "train_s"))
        )


@pytest.mark.parametrize("preset", ["dapo", "grpo"])
def test_axes_have_whole_groups_and_no_ranks_without_a_role(preset: str) -> None:
    base = config(preset, placement={"mode": "disaggregated"})
    axes = make_axes(base, ["ranks", "batch"], [1, 2, 3], [0.25, 1, 1.6])
    assert axes["batch"].values == [32, 64, 96], "multiples of 4 minibatches of groups of 8"
    for axis in axes.values():
        for value in axis.values:
            there = axis.at(base, value)
            assert not faults(there)
            assert world_size(there) == (value if axis is axes["ranks"] else world_size(base))
    actor = role_placements(axes["ranks"].at(base, 3))["actor"]
    assert actor.dp == (3 if preset == "dapo" else 2)
    assert with_batch(config(preset, overlap={"delta": {"initial": 8, "max": 8}}), 32).overlap.delta.max == 4


@pytest.mark.parametrize("preset", ["dapo", "grpo"])
def test_every_placement_of_the_overlap_benchmark(preset: str) -> None:
    for placement, ranks in (("single", 1), ("replicas", 2)):
        there = placed(config(preset, placement={"mode": "disaggregated"}), placement, 2)
        assert world_size(there) == ranks and not faults(there)
    assert known_modes(config(preset)) == [mode for mode in MODES if "critic" not in mode and "both" not in mode]


@pytest.mark.parametrize("preset", ["dapo", "reinforce_pp"])
def test_the_loop_without_models_has_no_scorer_to_wait_for(preset: str) -> None:
    steps = DryRun(config(preset), 16).run()
    assert len(steps) == 3 and all(step["planner and checker"] > 0 for step in steps)


def test_the_dry_run_says_that_it_plays_no_filter() -> None:
    row = {"batch_size": 64}
    found = {"dry": {"total_ms": 1.0, "parts_ms": {}}, "batch": 64, "results": [row], "scaled_percent": 1.0, "scaled_step_s": 1.0}
    told = [[line for line in remarks(found | {"filtered": on}) if "no filter" in line] for on in (True, False)]
    assert told == [["the dry run has no rewards, and so no filter: every group is kept"], []]


def test_forks_are_compared_in_groups_alone(tmp_path: Path) -> None:
    alone = config("reinforce_pp", rollout={"batch_size": 64, "group_size": 1, "max_response_tokens": 16})
    with pytest.raises(ConfigError, match="rollout.group_size is 1: a prompt has one response, and no cache is forked"):
        bench_fork(Suite(tmp_path, 1, launch), {8: alone})


def test_every_kind_of_reward_has_the_model_that_it_needs() -> None:
    base = config("grpo")
    found = {kind: rewarded(base, kind) for kind in REWARDS}
    assert [faults(each) for each in found.values()] == [[], [], []]
    assert found["verifier"].rewards == base.rewards and found["verifier"].reward is None
    assert not found["model"].scores_steps and found["process"].scores_steps
    for kind in ("model", "process"):
        reward = found[kind].reward
        assert reward is not None and reward.init == base.actor.init and reward.init_seed != base.actor.init_seed
        [part] = rewarded(found[kind], "verifier").rewards
        assert (part.name, part.buffer_tokens) == ("length", 16), "it had no rule"
    trained = base.model_copy(update={"actor": base.actor.model_copy(update={"init": None, "checkpoint": Path("weights")})})
    reward = rewarded(trained, "model").reward
    assert reward is not None and (reward.checkpoint, reward.fresh_head) == (Path("weights"), True)
    assert rewarded(found["model"], "process").reward == found["model"].reward, "its own"


def test_what_needs_a_critic_or_a_scorer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("tok").mkdir()
    Path("rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    tree = yaml.safe_load(config_yaml(config("dapo")))
    tree |= {"tokenizer": {"path": "tok"}, "data": {"path": "rows.jsonl", "max_prompt_tokens": 16}}
    Path("c.yaml").write_text(yaml.safe_dump(tree))
    wrong = {
        (
            "overlap",
            "--modes",
            "full,full+critic",
        ): "--modes names full+critic, which would hide the critic's update, but "
        "algorithm.preset dapo has no critic; choose from sequential, intra, inter, full, full+backfill",
        ("chunk",): "no reference, critic or reward model, so a chunk's size decides nothing",
        ("overlap", "--rewards", "model,judge"): "--rewards names judge; choose from verifier, model, process, or all",
        ("overlap", "--rewards", "all", "--limit"): "--limit is of one kind of reward; leave out --limit or --rewards",
        ("weave",): "no reference, critic or reward model, so nothing is woven into the decoding",
        ("overhead", "--batch", "100"): "--batch is 100, but must be a multiple of 32 (ppo.minibatches 4 times "
        "rollout.group_size 8); give --batch 96",
    }
    for (kind, *arguments), message in wrong.items():
        assert main(["bench", kind, "c.yaml", "--out", "out", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not Path("out").exists()
