"""Presets, filters and long responses as a configuration resolves them, and every rule of theirs."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from oppo_megatron.config import derived
from oppo_megatron.config.algorithm import CHOICES, PRESETS, AlgorithmConfig
from oppo_megatron.config.derived import batch_rows, describe_batch, most_judged, most_sequences, num_updates, share_of_sequences
from oppo_megatron.config.load import load_config
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.config.ppo import KLConfig, PPOConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.preflight.validate import check_train
from tests.support.configs import put
from tests.unit.test_preflight_settings import problems_of, settings_without_critic


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "rewards": [{"kind": "verifier", "name": "gsm8k"}], "rollout": {"batch_size": 128, "max_response_tokens": 100},
        "algorithm": {"preset": "grpo"},
    }  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_what_its_row_says(settings: dict[str, Any], name: str) -> None:
    put(settings, "algorithm.preset", name)
    if PRESETS[name].baseline == "critic":
        settings["critic"] = {"checkpoint": settings["actor"]["checkpoint"]}
    config, preset = TrainConfig.model_validate(settings), PRESETS[name]
    assert check_train(config) == []
    assert {choice: getattr(config.algorithm, choice) for choice in CHOICES} == preset.choices
    staleness = "decoupled" if preset.ratio.startswith("sequence") else "behaviour"
    assert config.ppo == PPOConfig(**preset.ppo, kl=KLConfig(**preset.kl), staleness=staleness)
    assert config.rollout.group_size == preset.group_size
    assert ("reference" in named_roles(config)) == (preset.kl["mode"] != "none")
    assert TrainConfig.model_validate(config.model_dump()) == config, "a resolved file is read as it is"


@pytest.mark.parametrize(("changes", "staleness"), [
    ({}, "decoupled"), ({"ppo.staleness": "behaviour"}, "behaviour"), ({"overlap.inter": False}, "behaviour"),
    ({"overlap.inter": False, "actor.dtype": "bfloat16"}, "decoupled"),
    ({"algorithm": {"preset": "grpo"}, "actor.dtype": "bfloat16"}, "behaviour"),
    ({"overlap.delta": {"initial": 0, "max": 0}}, "behaviour"),
    ({"overlap.delta": {"initial": 0, "max": 0}, "overlap.backfill": True}, "decoupled"),
    ({"algorithm.ratio": "token"}, "behaviour"), ({"algorithm": {"preset": "cispo", "ratio": "sequence_token"}}, "decoupled"),
], ids=str)  # fmt: skip
def test_ratios_of_carried_responses_are_decoupled(settings: dict[str, Any], changes: dict[str, Any], staleness: str) -> None:
    assert problems_of(settings, {"algorithm.preset": "gspo", **changes}) == []
    assert TrainConfig.model_validate(settings).ppo.staleness == staleness


def test_a_preset_brings_only_values_that_there_are_and_any_setting_may_stand_beside_it(settings: dict[str, Any]) -> None:
    """Nothing would read the coefficient and estimator of that KL, and nobody could remove them."""
    fields = AlgorithmConfig.model_fields
    assert set(get_args(fields["preset"].annotation)) == set(PRESETS)
    for preset in PRESETS.values():
        assert all(value in get_args(fields[name].annotation) for name, value in preset.choices.items())
    assert problems_of(settings, {"ppo.kl": {"mode": "none"}}) == []
    config = TrainConfig.model_validate(settings)
    assert config.ppo.kl == KLConfig(mode="none") and "reference" not in named_roles(config)
    settings["algorithm"] |= {"reduction": "token_mean", "scale": "none"}
    settings["ppo"] = {"clip": 0.1, "kl": {"mode": "loss", "estimator": "k2"}}
    put(settings, "rollout.group_size", 4)
    config = TrainConfig.model_validate(settings)
    assert check_train(config) == []
    assert (config.algorithm.reduction, config.algorithm.scale, config.algorithm.baseline) == (
        "token_mean", "none", "group_mean",
    )  # fmt: skip
    assert (config.ppo.clip, config.ppo.kl.estimator, config.ppo.kl.coefficient) == (0.1, "k2", 0.04)
    assert config.rollout.group_size == 4


def test_a_batch_is_told_in_rows_groups_and_optimizer_steps(settings: dict[str, Any]) -> None:
    settings["ppo"] = {"epochs": 2, "minibatches": 4}
    config = TrainConfig.model_validate(settings)
    assert describe_batch(config) == (
        "algorithm grpo: a batch is 128 responses to 16 groups of 8; 8 optimizer steps (epochs 2 x minibatches 4) of 32 responses"
    )
    assert most_sequences(config) == 128 + 8 * 8, "delta counts groups"


def test_greedy_responses_are_told_apart_from_those_of_the_batch(settings: dict[str, Any]) -> None:
    settings["algorithm"] = {"preset": "remax"}
    put(settings, "rollout.batch_size", 120)
    config = TrainConfig.model_validate(settings)
    assert describe_batch(config) == (
        "algorithm remax: a batch is 120 responses to 120 prompts, and 120 greedy ones that are not trained; 1 optimizer step "
        "(epochs 1 x minibatches 1) of 120 responses"
    )
    assert (batch_rows(config), most_sequences(config)) == (240, 240 + 8 * 2)
    assert {role: share_of_sequences(config, role, 2) for role in ("actor", "reward", "reference")} == {
        "actor": 128, "reward": 128, "reference": 64,
    }  # fmt: skip
    put(settings, "rollout.group_size", 4)
    several = TrainConfig.model_validate(settings)
    assert describe_batch(several).startswith(
        "algorithm remax: a batch is 120 responses to 30 groups of 4, and 30 greedy ones that are not trained; "
    )
    assert (batch_rows(several), most_sequences(several)) == (150, 150 + 8 * 5)
    assert [share_of_sequences(several, role, 1) for role in ("actor", "reference")] == [190, 152]
    assert check_train(several) == [] and not several.algorithm.needs_group
    put(settings, "overlap.inter", False)
    assert most_sequences(TrainConfig.model_validate(settings)) == 150, "delta counts with inter-step overlap only"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"rollout.group_size": 1}, "rollout.group_size is 1, but algorithm.preset grpo (baseline group_mean, scale group_std)"),
    ({"algorithm": {"preset": "reinforce_pp", "scale": "group_std"}, "rollout.group_size": 1},
        "rollout.group_size is 1, but algorithm.preset reinforce_pp (baseline none, scale group_std)"),
    ({"algorithm.loss": "a.b:f", "algorithm.objective": "plain"}, "algorithm.objective is plain, but algorithm.loss replaces it"),
    ({"algorithm.loss": "a.b:f", "ppo.clip": 0.3}, "ppo.clip is 0.3, but algorithm.loss is your own function"),
    ({"algorithm.advantage": "a.b:f", "algorithm.scale": "none"}, "algorithm.scale is none, but algorithm.advantage replaces it"),
    ({"algorithm": {"preset": "online_dpo", "loss": "a.b:f"}},
        "algorithm.loss is set, but algorithm.preset online_dpo has pairs"),
    ({"rollout.batch_size": 100}, "must be a multiple of rollout.group_size 8 (a batch has whole groups); set it to 96 or 104"),
    ({"rollout.batch_size": 5, "overlap.delta": {"initial": 0, "max": 0}}, "set it to 8, or the group size to a divisor"),
    ({"ppo.minibatches": 32}, "ppo.minibatches 32 does not divide the 16 groups of a batch (128 responses in groups of 8)"),
    ({"overlap.delta.max": 65}, "overlap.max_staleness 4 times rollout.batch_size 128 / rollout.group_size 8 = 16 prompts"),
    ({"ppo.gae_lambda": 0.9}, "ppo.gae_lambda is 0.9, but algorithm.preset grpo has no critic"),
    ({"algorithm": {"preset": "grpo", "objective": "plain"}, "ppo.clip_high": 0.3},
        "ppo.clip_high is 0.3, but algorithm.objective is plain, which has no ratio"),
    ({"algorithm": {"preset": "cispo"}, "ppo.dual_clip": 3.0}, "ppo.dual_clip is 3, but algorithm.objective is cispo"),
    ({"algorithm": {"preset": "cispo"}, "ppo.clip_high": None}, "ppo.clip_high is null, but algorithm.objective cispo"),
    ({"algorithm": {"preset": "grpo", "objective": "plain"}, "ppo.epochs": 2}, "is plain, for one optimizer step"),
    ({"algorithm": {"preset": "gspo", "objective": "plain"}, "ppo.clip_high": None},
        "algorithm.ratio is sequence, but algorithm.objective plain has no ratio"),
    ({"algorithm": {"preset": "dapo"}, "ppo.kl": {"coefficient": 0.01}}, "ppo.kl.coefficient is 0.01, but ppo.kl.mode is none"),
    ({"ppo.kl": {"mode": "loss", "estimator": "k1"}}, "ppo.kl.estimator k1 is 0 in expectation"),
    ({"ppo.kl": {"mode": "margin", "coefficient": 0.0, "estimator": "k1"}}, "algorithm.preset grpo has no pairs"),
    ({"algorithm": {"preset": "remax", "scale": "group_std"}},
        "algorithm.scale is group_std, but algorithm.baseline greedy compares a response with the greedy one"),
    ({"algorithm": {"preset": "remax"}, "rollout.temperature": 0.0},
        "rollout.temperature is 0, at which every response is the greedy one"),
    ({"algorithm": {"preset": "remax"}, "rollout.top_k": 1}, "rollout.top_k is 1, at which every response is the greedy one"),
    *(({"algorithm": {"preset": preset}, **greedy}, "the responses to a prompt are all the same, and compared with each other")
        for preset in ("grpo", "dapo", "rloo", "gspo", "reinforce_pp_baseline")
        for greedy in ({"rollout.temperature": 0}, {"rollout.temperature": 1e-4}, {"rollout.top_k": 1}, {"rollout.top_p": 1e-7})),
    ({"algorithm": {"preset": "reinforce_pp"}, "rollout.group_size": 2, "filter": "reward", "overlap.backfill": True,
        "rollout.top_k": 1},
        "rollout.top_k is 1, at which the responses to a prompt are all the same, and the filter would drop every group"),
    ({"algorithm": {"preset": "cispo"}, "ppo.clip": 0.1}, "ppo.clip is 0.1, but algorithm.objective is cispo"),
    ({"algorithm": {"preset": "grpo", "objective": "plain"}, "ppo.clip": 0.1}, "ppo.clip is 0.1, but algorithm.objective"),
    ({"ppo.reward_normalization": "batch"}, "ppo.reward_normalization is batch, but algorithm.scale group_std divides by"),
    ({"algorithm": {"preset": "reinforce_pp_baseline"}, "ppo.reward_normalization": "running"},
        "ppo.reward_normalization is running, but algorithm.scale whiten divides by"),
    ({"ppo.kl": {"target": 6.0, "coefficient": 0.0}}, "ppo.kl.target is 6, but a ppo.kl.coefficient of 0 stays 0"),
    ({"algorithm": {"preset": "dapo"}, "guards.kl_mean": 3.0}, "guards.kl_mean is 3, but there is no KL"),
    ({"rewards": [{"kind": "verifier", "name": "gsm8k", "weight": 0.0}]}, "every part of rewards has weight 0"),
    ({"actor.optimizer": {"lr": 1e-5, "min_lr": 1e-6}}, "actor.optimizer.min_lr is 1e-06, but actor.optimizer.decay is constant"),
    ({"ppo.kl": {"mode": "score", "estimator": "k3+"}}, "ppo.kl.estimator is k3+, but ppo.kl.mode score has no gradient"),
]  # fmt: skip


BROKEN += [({"algorithm": {"preset": "online_dpo"}, **changes}, message) for changes, message in (
    ({"rollout.group_size": 1}, "rollout.group_size is 1, but algorithm.preset online_dpo (baseline best_worst, scale none)"),
    ({"ppo.kl": {"mode": "none"}},
        "ppo.kl.mode is none, but algorithm.preset online_dpo measures its pairs against the reference; remove it"),
    ({"ppo.kl": {"mode": "penalty"}}, "ppo.kl.mode is penalty, but algorithm.preset online_dpo measures its pairs"),
    ({"ppo.kl": {"coefficient": 0.1}}, "ppo.kl.coefficient is 0.1, but with pairs the reference is in their margins alone"),
    ({"ppo.kl": {"target": 6.0}}, "ppo.kl.target is 6, but with pairs the reference is in their margins alone"),
    ({"ppo.clip": 0.1}, "ppo.clip is 0.1, but a pair is compared by the policy and the reference alone, whoever drew it"),
    ({"ppo.staleness": "decoupled"}, "ppo.staleness is decoupled, but a pair is compared by the policy and the reference"),
    ({"ppo.entropy_coefficient": 0.1}, "ppo.entropy_coefficient is 0.1, but a pair is compared"),
    ({"ppo.reward_normalization": "batch"}, "ppo.reward_normalization is batch, but of a pair only which response is the better"),
    ({"ppo.gamma": 0.9}, "ppo.gamma is 0.9, but of a pair only which response is the better one counts"),
    ({"ppo.gae_lambda": 0.9}, "ppo.gae_lambda is 0.9, but algorithm.preset online_dpo has no critic"),
    ({"algorithm.ratio": "sequence"}, "algorithm.ratio is sequence, but algorithm.objective dpo has no ratio"),
    ({"algorithm.scale": "group_std"}, "algorithm.scale is group_std, but a pair has no advantage to be scaled"),
    ({"rollout.temperature": 0.0}, "at which greedy responses to a prompt are all the same, and no pair"),
    ({"ppo.truncated": "mask"}, "ppo.truncated is mask, but a pair needs both of its responses"),
    ({"guards.ratio_max": 9.0}, "guards.ratio_max is 9, but algorithm.preset online_dpo has no ratio"),
    ({"rollout.temperature": 0.9, "guards.kl_mean": 3.0}, "guards.kl_mean is 3, but there is no KL to a reference"),
    ({"runtime.micro_batch_tokens": 399},
        "runtime.micro_batch_tokens is 399, but a pair may have 400 tokens (twice data.max_prompt_tokens + "
        "rollout.max_response_tokens) and must fit; raise it to 400"),
)]  # fmt: skip
ALLOWED: list[dict[str, Any]] = [
    {"algorithm": {"preset": "reinforce_pp"}, "rollout.temperature": 0.0}, {"ppo.kl": {"mode": "loss", "estimator": "k1+"}},
    {"ppo.reward_normalization": "batch", "ppo.truncated": 0.5}, {"algorithm.scale": "none", "ppo.reward_normalization": "batch"},
    {"algorithm": {"preset": "remax"}, "ppo.reward_normalization": "running"},
    {"rewards": [{"kind": "verifier", "name": n, "weight": w} for n, w in (("gsm8k", 1.0), ("arithmetic", 0.0))]},
    {"guards.kl_mean": 3.0}, {"algorithm": {"preset": "online_dpo"}, "guards.kl_mean": 3.0},
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [*BROKEN, *((each, None) for each in ALLOWED)], ids=str)
def test_each_broken_rule_is_named_alone(settings: dict[str, Any], changes: dict[str, Any], message: str | None) -> None:
    problems = problems_of(settings, changes)
    assert problems == [] if message is None else len(problems) == 1 and message in problems[0], problems


@pytest.mark.parametrize(("changes", "message"), [
    ({"algorithm": {"preset": "grpo", "baseline": "critic"}}, "baseline is critic, but algorithm.preset grpo has none"),
    ({"algorithm": {"preset": "ppo", "baseline": "group_mean"}}, "algorithm.preset ppo is what trains a critic"),
    ({"algorithm": {"preset": "ppo", "baseline": "greedy"}}, r"preset ppo is what trains a critic.*remax .a greedy"),
    ({"algorithm": {"preset": "remax"}, "critic": {"checkpoint": "x"}}, "critic is given, but algorithm.preset remax has"),
    ({"algorithm": {"preset": "ppo"}}, "critic is missing, but algorithm.preset ppo trains one"),
    ({"critic": {"checkpoint": "x"}}, "critic is given, but algorithm.preset grpo has none"),
    ({"algorithm": {"preset": "dapo"}, "reference": {"checkpoint": "x"}}, "reference is given, but ppo.kl.mode is none"),
    ({"algorithm": {"preset": "online_dpo", "baseline": "group_mean"}},
        "baseline is group_mean, but algorithm.preset online_dpo is made of best_worst; remove it"),
    ({"algorithm": {"preset": "online_dpo", "objective": "clip"}},
        "objective is clip, but algorithm.preset online_dpo is made of dpo; remove it"),
    ({"algorithm": {"preset": "grpo", "reduction": "pair_mean"}},
        "reduction is pair_mean, but algorithm.preset grpo has no pairs; remove it, or use online_dpo"),
    ({"algorithm": {"preset": "online_dpo"}, "critic": {"checkpoint": "x"}}, "critic is given, but algorithm.preset online"),
    ({"algorithm": {"preset": "online_dpo"}, "dpo": None}, "dpo is null, but algorithm.preset online_dpo has a loss of"),
    ({"dpo": {"beta": 0.2}}, "dpo is given, but algorithm.preset grpo has no pairs; remove the section, or choose"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_roles_that_a_preset_has_not_are_refused(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings | changes)


def test_pairs_are_told_with_the_batch_and_have_dpos_loss(settings: dict[str, Any]) -> None:
    settings |= {"algorithm": {"preset": "online_dpo"}, "dpo": {"beta": 0.2}, "ppo": {"minibatches": 4}}
    config = TrainConfig.model_validate(settings)
    assert check_train(config) == []
    assert describe_batch(config) == (
        "algorithm online_dpo: a batch is 128 responses to 64 groups of 2; 4 optimizer steps (epochs 1 x minibatches 4) of 32 "
        "responses, at most 16 pairs"
    )
    assert config.dpo is not None and (config.dpo.loss, config.dpo.beta) == ("sigmoid", 0.2)
    assert derived.minibatch_parts(config) == 16


@pytest.mark.parametrize(("preset", "placement", "message"), [
    ("online_dpo", {"mode": "colocated", "actor": {"dp": 5}},
        r"trained with dp 5, but a minibatch has 4 pairs \(rollout.batch_size 128"),
    ("dapo", {"mode": "disaggregated", "scorer": {"tp": 2}}, "placement.scorer is tp 2 .*nothing would use its ranks"),
    ("dapo", {"mode": "disaggregated", "reference": "actor"}, "placement.reference is actor, but ppo.kl.mode is none"),
], ids=["a replica without a pair", "ranks for no scorer", "no reference"])  # fmt: skip
def test_layouts_that_an_algorithm_cannot_use(settings: dict[str, Any], preset: str, placement: Any, message: str) -> None:
    changes = {"algorithm": {"preset": preset}, "placement": placement, "ppo": {"minibatches": 16}}
    (problem,) = check_layouts(TrainConfig.model_validate(settings | changes), {})
    assert re.search(message, problem), problem


@pytest.mark.parametrize(("preset", "wrong"), [
    ("dapo", {"ppo.kl.coefficient": 0.2}), ("dapo", {"algorithm.baseline": "critic"}), ("dapo", {"dpo": {}}),
    ("dapo", {"critic": {"init": {}}}), ("dapo", {"reference": {"init": {}}}), ("grpo", {"ppo.gae_lambda": 0.9}),
    ("grpo", {"ppo.value_clip": 0.3, "ppo.critic_warmup_steps": 3}), ("online_dpo", {"algorithm.scale": "whiten"}),
    ("online_dpo", {"algorithm.objective": "clip"}), ("online_dpo", {"algorithm.ratio": "sequence"}),
    ("online_dpo", {"ppo.kl.mode": "penalty"}), ("online_dpo", {"ppo.kl.target": 3.0}), ("online_dpo", {"ppo.clip": 0.1}),
    ("online_dpo", {"ppo.truncated": "mask"}), ("online_dpo", {"guards.ratio_max": 3.0}),
    ("grpo", {"rewards.0.entry_point": "a:b"}), ("grpo", {"rewards.0.pattern": "a"}),
])  # fmt: skip
def test_what_is_to_be_removed_can_be(settings: dict[str, Any], tmp_path: Path, preset: str, wrong: dict[str, Any]) -> None:
    for key, value in {"algorithm.preset": preset, **wrong}.items():
        put(settings, key, value)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings, default=str))))
    with pytest.raises(ConfigError, match="remove (it|them|the section)"):
        load_config(TrainConfig, path, check=check_train)
    load_config(TrainConfig, path, [f"{key}=null" for key in wrong], check=check_train)


def test_when_the_actor_is_updated_and_when_prompts_are_admitted(settings: dict[str, Any]) -> None:
    put(settings, "ppo", {"epochs": 2, "minibatches": 4, "critic_warmup_steps": 3})
    config = TrainConfig.model_validate(settings | {"algorithm": {"preset": "grpo"}})
    assert (num_updates(config, "actor", 10), num_updates(config, "critic", 10)) == (7 * 8, 10 * 8)
    assert num_updates(config, "actor", 2) == 0, "while the critic warms up"
    periods = [OverlapConfig(chunk=8, backfill=backfill).admission_period for backfill in (False, True, 24)]
    assert periods == [None, 8, 24], "after a chunk, or after a given number of steps"
    assert OverlapConfig(inter=False, backfill=24).admission_period is None
    carries = OverlapConfig(delta={"initial": 0, "max": 0}, backfill=True).carries
    assert carries(filtered=False) and not carries(filtered=True)


@pytest.fixture
def filtered(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "rewards": [{"kind": "verifier", "name": "gsm8k"}, {"kind": "python", "entry_point": "tests.e2e.rewards:failing"}],
        "rollout": {"batch_size": 32, "max_response_tokens": 100}, "algorithm": {"preset": "dapo"},
        "overlap": {"backfill": True, "delta": {"initial": 1, "max": 2}},
    }  # fmt: skip


def test_dapo_filters_groups_and_brings_the_backfill_that_its_filter_needs(filtered: dict[str, Any]) -> None:
    config = TrainConfig.model_validate(filtered)
    assert config.filter == "reward" and check_train(config) == []
    assert most_judged(config) == 20
    assert TrainConfig.model_validate(config.model_dump()) == config, "a resolved file is read as it is"
    for changes in ({"filter": None}, {"overlap": {"backfill": False, "delta": {"initial": 1, "max": 2}}}):
        config = TrainConfig.model_validate(filtered | changes)
        assert config.filter is None and check_train(config) == []
        assert TrainConfig.model_validate(config.model_dump()) == config
        assert "groups of equal reward are trained, too" in describe_batch(config)
    assert TrainConfig.model_validate(filtered | {"filter": "gsm8k"}).filter == "gsm8k"
    assert TrainConfig.model_validate(filtered | {"algorithm": {"preset": "gspo"}}).filter is None
    judge = {"rewards": [{"kind": "model"}, *filtered["rewards"]], "reward": {"checkpoint": "r"}}
    config = TrainConfig.model_validate(filtered | judge)  # the reward model reads the last chunk a period later
    assert [derived.verdict_lag(config, metric) for metric in ("reward", "model", "gsm8k")] == [1, 1, 0]
    # Brings none where it was refused, nor without carried rollouts, which is what backfill fills batches from
    bare = {**filtered, "overlap": {"delta": {"initial": 1, "max": 2}}}
    config = TrainConfig.model_validate(bare)
    assert config.overlap.backfill is True and config.filter == "reward" and check_train(config) == []
    assert "equal reward" not in describe_batch(config)
    plain = TrainConfig.model_validate(bare | {"filter": None})
    assert plain.overlap.backfill is False and plain.filter is None
    alone = TrainConfig.model_validate(bare | {"overlap": {"inter": False, "delta": {"initial": 1, "max": 2}}})
    assert alone.overlap.backfill is False and alone.filter is None
    assert TrainConfig.model_validate(bare | {"algorithm": {"preset": "grpo"}}).overlap.backfill is False


@pytest.mark.parametrize(("changes", "expected"), [
    ({"overlap.backfill": False, "filter": "reward"},
        "filter is set, but overlap.backfill is false, and nothing would take the places"),
    ({"algorithm.preset": "reinforce_pp", "filter": "reward"},
        "filter is set, but rollout.group_size is 1, and every group would be dropped"),
    ({"filter": "gsm8"}, "filter is 'gsm8', but no part of rewards has that name; did you mean `gsm8k`?"),
    ({"filter": "acc"}, "no part of rewards has that name; choose from reward, gsm8k, tests.e2e.rewards:failing"),
    ({"ppo.staleness_bounds": [0.5, 2.0]}, "ppo.staleness_bounds is [0.5, 2.0], but ppo.staleness behaviour has none"),
    ({"ppo.staleness": "opsm", "ppo.staleness_bounds": [0.5, 2.0]}, "opsm needs one number of at least 0; [0.0001] is usual"),
    ({"ppo.staleness": "opsm", "ppo.staleness_bounds": [-0.5]}, "opsm needs one number of at least 0"),
    ({"ppo.staleness": "icepop", "ppo.staleness_bounds": [1.1, 2.0]}, "icepop needs two, from 0 to 1 and above 1"),
    ({"ppo.staleness": "decoupled", "ppo.staleness_bounds": [0.0, 0.5]}, "decoupled needs two, from 0 to 1 and above 1"),
    ({"ppo.staleness": "seq_mask", "ppo.staleness_bounds": [1.0, 1.0]}, "seq_mask needs two, from 0 to 1 and above 1"),
])  # fmt: skip
def test_broken_rule_is_the_one_problem(filtered: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    problems = problems_of(filtered, changes)
    assert len(problems) == 1 and expected in problems[0], problems
