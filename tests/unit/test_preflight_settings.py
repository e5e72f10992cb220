"""Every cross-check: a good configuration has no problem, each broken rule exactly the one that names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.derived import longest_chunk, max_context, minibatch_rows, most_sequences
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.modeldir.adapters import read_adapter_config
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.preflight.validate import check_stop_ids, check_supervised, check_train


def settings_without_critic(tmp_path: Path) -> dict[str, Any]:
    for name in ("tok.model", "rows.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "actor").mkdir()
    return {
        "run_dir": tmp_path / "run",
        "tokenizer": {"path": tmp_path / "tok.model"},
        "data": {"path": tmp_path / "rows.jsonl", "max_prompt_tokens": 100},
        "actor": {"checkpoint": tmp_path / "actor"},
    }


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "critic": {"checkpoint": tmp_path / "actor"},
        "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100},
    }


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        settings = settings[int(section)] if isinstance(settings, list) else settings.setdefault(section, {})
    settings[last] = value


def test_good_configuration_has_no_problem(settings: dict[str, Any]) -> None:
    assert check_train(TrainConfig.model_validate(settings)) == []


def test_held_out_prompts_count_for_the_longest_context(settings: dict[str, Any]) -> None:
    assert max_context(TrainConfig.model_validate(settings)) == 200
    data = {"path": settings["data"]["path"], "max_prompt_tokens": 300}
    put(settings, "evaluation", {"data": data, "metrics": [{"kind": "verifier", "name": "gsm8k"}]})
    assert max_context(TrainConfig.model_validate(settings)) == 400


def test_sequences_and_rows_at_once(settings: dict[str, Any]) -> None:
    put(settings, "overlap.delta", {"initial": 3, "max": 5})
    put(settings, "ppo.minibatches", 4)
    config = TrainConfig.model_validate(settings)
    assert (most_sequences(config), minibatch_rows(config)) == (13, 2)
    put(settings, "overlap.inter", False)
    assert most_sequences(TrainConfig.model_validate(settings)) == 8


def test_a_chunk_ends_where_prompts_enter(settings: dict[str, Any]) -> None:
    def longest(**overlap: Any) -> int:
        return longest_chunk(TrainConfig.model_validate(settings | {"overlap": overlap}))

    assert longest() == longest(backfill=False) == 100, "else no chunk is longer than a response"
    assert longest(backfill=True, chunk=48) == 48
    assert longest(backfill=64) == 64
    assert longest(backfill=640) == 100


def test_backfill_asks_for_no_more_slots(settings: dict[str, Any]) -> None:
    plain, backfilled = (
        TrainConfig.model_validate(settings | {"overlap": {"backfill": on, "delta": {"max": 8}}}) for on in (False, True)
    )
    assert most_sequences(backfilled) == most_sequences(plain) == 16


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"ppo.minibatches": 3}, "ppo.minibatches 3 does not divide rollout.batch_size 8; choose from 1, 2, 4, 8"),
    ({"overlap.delta": {"initial": 5, "max": 4}}, "overlap.delta.initial is 5, but overlap.delta.max is 4"),
    ({"overlap.delta.max": 33}, "delta.max is 33, but must not exceed overlap.max_staleness 4 times rollout.batch_size 8"),
    ({"overlap.chunk": [16, 16, 32]}, "each size may appear once"),
    ({"overlap": {"inter": False, "backfill": True}}, "overlap.backfill is true, but overlap.inter is false"),
    ({"overlap": {"backfill": 48}}, "backfill is 48, but must be a multiple of overlap.chunk 32; set it to 64"),
    ({"rollout.forced_lengths": ["gone.csv", "x"]}, "rollout.forced_lengths `gone.csv` does not exist"),
    ({"steps": 3, "ppo.critic_warmup_steps": 3}, "ppo.critic_warmup_steps is 3, but the run has 3 steps"),
    ({"ppo.kl.mode": "loss"}, "ppo.kl.estimator k1 is 0 in expectation"),
    ({"ppo.kl": {"mode": "loss", "estimator": "k1", "coefficient": 1.0}}, "set it to k2, k3 or k1+"),
    ({"rollout.stop": [7, -1]}, "rollout.stop has -1, but ids are numbers from 0 on"),
    ({"rollout.stop": ["x", ""]}, "rollout.stop has an empty text"),
    (
        {"rollout.stop": ["x"], "rollout.forced_lengths": [9, 1.0]},
        "rollout.stop is set, but with rollout.forced_lengths a response ends at its length only",
    ),
    ({"rollout.forced_lengths": "gone.csv"}, "rollout.forced_lengths `gone.csv` does not exist"),
    ({"runtime.micro_batch_tokens": 199}, "runtime.micro_batch_tokens is 199, but one sequence may have 200 tokens"),
    ({"actor.init": {"model_type": "llama"}}, "actor has both of checkpoint and init"),
    ({"actor.checkpoint": None}, "actor has neither of checkpoint and init"),
    ({"reference": {}}, "reference has neither of checkpoint and init"),
    ({"rewards": [{"kind": "model"}]}, "there is no `reward` section"),
    ({"rewards": [{"kind": "verifier"}]}, "rewards.0 is a verifier without a `name`"),
    ({"rewards": [{"kind": "python"}]}, "rewards.0.entry_point is None, but must be `package.module:function`"),
    ({"rewards": [{"kind": "python", "entry_point": "no_colon"}]}, "must be `package.module:function`"),
    ({"rewards": [{"kind": "python", "entry_point": "a:b", "name": "gsm8k"}]}, "kind python has no rule to name"),
    ({"rewards": [{"kind": "verifier", "name": "gsm8k", "options": {"a": 1}}]}, "only kind python takes them"),
    ({"guards.action": "rollback"}, "guards.action is rollback, but checkpoint.every_steps is 0"),
    ({"data.prompt_template": "no place"}, "data.prompt_template is 'no place', but must contain `{prompt}`"),
    ({"data.path": []}, "data.path is an empty list"),
    ({"actor.optimizer": {"lr": 1e-5, "min_lr": 1e-4}}, "actor.optimizer.min_lr is 0.0001, but must not exceed lr 1e-05"),
]


@pytest.mark.parametrize(("changes", "expected"), BROKEN, ids=lambda value: str(value)[:50])
def test_broken_rule_is_the_one_problem(settings: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    for key, value in changes.items():
        put(settings, key, value)
    problems = check_train(TrainConfig.model_validate(settings))
    assert len(problems) == 1 and expected in problems[0]


GOOD: list[dict[str, Any]] = [
    {"guards": {"action": "rollback"}, "checkpoint.every_steps": 5},
    {"overlap": {"inter": False, "delta": {"initial": 9, "max": 2}}},
    {"overlap": {"backfill": 96}},
    {"steps": 4, "ppo.critic_warmup_steps": 3},
    {"rewards": [{"kind": "python", "entry_point": "pkg.mod:f", "options": {"a": 1}}]},
    {"rollout.forced_lengths": [20, 1.0]},
    {"rollout.forced_lengths": [__file__, "ContextTokens"]},
]


@pytest.mark.parametrize("changes", GOOD, ids=lambda value: str(value)[:50])
def test_unusual_but_right(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        put(settings, key, value)
    assert check_train(TrainConfig.model_validate(settings)) == []


def test_reward_model_must_be_used_once(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["reward"] = {"checkpoint": tmp_path / "actor"}
    assert "no part of rewards has kind model" in check_train(TrainConfig.model_validate(settings))[0]
    settings["rewards"] = [{"kind": "model"}, {"kind": "verifier", "name": "arithmetic"}]
    assert check_train(TrainConfig.model_validate(settings)) == []
    settings["rewards"].append({"kind": "model", "weight": 2})
    assert "names the reward model 2 times" in check_train(TrainConfig.model_validate(settings))[0]
    settings["rewards"] = [{"kind": "process"}, {"kind": "model"}]
    assert "names the reward model 2 times" in check_train(TrainConfig.model_validate(settings))[0]


def test_what_a_process_reward_model_goes_with(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["rewards"] = [{"kind": "process", "step_rewards": "sum"}]
    assert "no `reward` section" in check_train(TrainConfig.model_validate(settings))[0]
    settings["reward"] = {"checkpoint": tmp_path / "actor"}
    assert check_train(TrainConfig.model_validate(settings)) == []
    put(settings, "ppo.reward_normalization", "batch")
    (problem,) = check_train(TrainConfig.model_validate(settings))
    assert "does not scale the rewards of steps (step_rewards sum)" in problem
    settings["rewards"][0]["step_rewards"] = "min"
    assert check_train(TrainConfig.model_validate(settings)) == []
    settings["evaluation"] = {"data": settings["data"], "metrics": [{"kind": "model"}]}
    (problem,) = check_train(TrainConfig.model_validate(settings))
    assert "evaluation.metrics has a part of kind model, but `rewards` one of kind process" in problem


@pytest.mark.parametrize(
    ("key", "missing", "nearest"),
    [
        ("tokenizer.path", "tok.modl", "tok.model"),
        ("actor.checkpoint", "acter", "actor"),
        ("data.path", "row.jsonl", "rows.jsonl"),
    ],
)
def test_missing_path_names_its_nearest_sibling(
    settings: dict[str, Any], tmp_path: Path, key: str, missing: str, nearest: str
) -> None:
    put(settings, key, tmp_path / missing)
    problems = check_train(TrainConfig.model_validate(settings))
    assert problems == [f"{key} `{tmp_path / missing}` does not exist; did you mean `{tmp_path / nearest}`?"]


def test_missing_path_without_a_sibling_says_where_the_trail_ends(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings["tokenizer"] = {"path": "zzzzzzzz/x.model"}
    assert "`.` has no `zzzzzzzz`" in check_train(TrainConfig.model_validate(settings))[0]


def test_all_broken_rules_come_at_once(settings: dict[str, Any]) -> None:
    for key, value in {"ppo.minibatches": 3, "overlap.delta.max": 33, "data.path": []}.items():
        put(settings, key, value)
    assert len(check_train(TrainConfig.model_validate(settings))) == 3


def test_stop_ids_are_of_the_vocabulary(settings: dict[str, Any]) -> None:
    put(settings, "rollout.stop", [9, 64, 63])
    (problem,) = check_stop_ids(TrainConfig.model_validate(settings).rollout, 64)
    assert problem.startswith("rollout.stop has 64, but the actor's vocabulary ends at 63")


def supervised(settings: dict[str, Any]) -> dict[str, Any]:
    common = {key: settings[key] for key in ("run_dir", "tokenizer")} | {"data": {"path": settings["data"]["path"]}}
    return {**common, "model": {"checkpoint": settings["actor"]["checkpoint"]}, "max_tokens": 64}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["model"].clear(), "model has neither"),
        (lambda s: s.update(runtime={"micro_batch_tokens": 63}), "one sequence may have 64 tokens (max_tokens)"),
        (lambda s: s["data"].update(completion_template="x"), "data.completion_template is 'x'"),
        (lambda s: s.update(optimizer={"lr": 1.0, "min_lr": 2.0}), "optimizer.min_lr is 2.0"),
        (lambda s: s.update(run_dir=s["tokenizer"]["path"]), "is a file, but must be a folder"),
        (lambda s: s.update(run_dir=s["tokenizer"]["path"] / "run"), "nothing can be written in"),
    ],
)
def test_supervised_rules(settings: dict[str, Any], change: Callable[[dict[str, Any]], None], expected: str) -> None:
    good = supervised(settings)
    assert check_supervised(SFTConfig.model_validate(good)) == []
    change(good)
    problems = check_supervised(SFTConfig.model_validate(good))
    assert len(problems) == 1 and expected in problems[0]


def test_a_run_directory_that_cannot_be_written(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (problem,) = check_train(TrainConfig.model_validate(settings))
    assert f"nothing can be written in `{settings['run_dir'].parent}`" in problem


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (["weights"], "name `run/weights`"),
        (["weights/critic", "weights/actor"], "name `run/weights/actor` or `run/weights/critic`"),
        (["checkpoints/step-000002/models/model"], "name `run/checkpoints/step-000002/models/model`"),
        ([], "`run` is the directory of a run without such weights"),
    ],
)
def test_a_run_in_the_place_of_a_model_is_answered_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in weights:
        Path("run", folder).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            Path("run", folder, name).write_text("{}")
        Path("run", folder, "adapter_config.json").write_text("{}")
        Path("run", folder, "adapter_model.safetensors").write_text("")
    Path("run/tokenizer").mkdir(parents=True)  # by its name alone no file of a tokenizer
    Path("run/config.yaml").write_text("{}")
    for read in (lambda: read_hf_config(ModelConfig(checkpoint=Path("run"))), lambda: read_adapter_config(Path("run"))):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert named in str(caught.value)
    with pytest.raises(ConfigError, match="holds no tokenizer") as refused:
        load_tokenizer(TokenizerConfig(path=Path("run")))
    assert not weights or named in str(refused.value)
