"""Every cross-check: a good configuration has no problem, each broken rule exactly the one that names it."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from pytest import MonkeyPatch

from oppo_megatron.cli.load import guess_kind
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.derived import longest_chunk, max_context, minibatch_rows, most_sequences
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import DPOConfig, SFTConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.role_memory import supervised_holdings
from oppo_megatron.modeldir.adapters import read_adapter_config
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.preflight.validate import check_stop_ids, check_supervised, check_train, supervised_problems
from tests.support.configs import put
from tests.support.hf import save_tiny
from tests.support.tokenizers import save_byte_level


def settings_without_critic(tmp_path: Path) -> dict[str, Any]:
    for name in ("tok.model", "rows.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "actor").mkdir()
    return {
        "run_dir": tmp_path / "run", "tokenizer": {"path": tmp_path / "tok.model"},
        "data": {"path": tmp_path / "rows.jsonl", "max_prompt_tokens": 100}, "actor": {"checkpoint": tmp_path / "actor"},
    }  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "critic": {"checkpoint": tmp_path / "actor"}, "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100},
    }  # fmt: skip


def problems_of(settings: dict[str, Any], changes: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    for key, value in changes.items():
        put(settings, key, value)
    return check_train(TrainConfig.model_validate(settings))


def test_sequences_tokens_and_rows_at_once_and_a_chunk_that_ends_where_prompts_enter(settings: dict[str, Any]) -> None:
    assert max_context(TrainConfig.model_validate(settings)) == 200
    data = {"path": settings["data"]["path"], "max_prompt_tokens": 300}
    put(settings, "evaluation", {"data": data, "metrics": [{"kind": "verifier", "name": "gsm8k"}]})
    assert max_context(TrainConfig.model_validate(settings)) == 400, "of held-out prompts, too"
    put(settings, "overlap.delta", {"initial": 3, "max": 5})
    put(settings, "ppo.minibatches", 4)
    config = TrainConfig.model_validate(settings)
    assert (most_sequences(config), minibatch_rows(config)) == (13, 2)
    put(settings, "overlap.inter", False)
    assert most_sequences(TrainConfig.model_validate(settings)) == 8

    def of(**overlap: Any) -> TrainConfig:
        return TrainConfig.model_validate(settings | {"overlap": overlap})

    assert longest_chunk(of()) == longest_chunk(of(backfill=False)) == 100, "else no chunk is longer than a response"
    assert longest_chunk(of(backfill=True, chunk=48)) == 48
    assert (longest_chunk(of(backfill=64)), longest_chunk(of(backfill=640))) == (64, 100)
    assert most_sequences(of(backfill=True, delta={"max": 8})) == most_sequences(of(backfill=False, delta={"max": 8})) == 16


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
    ({"rollout.stop": ["x"], "rollout.forced_lengths": [9, 1.0]},
        "rollout.stop is set, but with rollout.forced_lengths a response ends at its length only"),
    ({"rollout.forced_lengths": "gone.csv"}, "rollout.forced_lengths `gone.csv` does not exist"),
    ({"runtime.micro_batch_tokens": 199}, "runtime.micro_batch_tokens is 199, but one sequence may have 200 tokens"),
    ({"actor.init": {"model_type": "llama"}}, "actor has both of checkpoint and init"),
    ({"actor.checkpoint": None}, "actor has neither of checkpoint and init"),
    ({"reference": {}}, "reference has neither of checkpoint and init"),
    ({"rewards": [{"kind": "model"}]}, "but `reward` is missing; add it"),
    ({"rewards": [{"kind": "verifier"}]}, "rewards.0 is a verifier without a `name`"),
    ({"rewards": [{"kind": "python"}]}, "rewards.0.entry_point is None, but must be `package.module:function`"),
    ({"rewards": [{"kind": "python", "entry_point": "no_colon"}]}, "must be `package.module:function`"),
    ({"rewards": [{"kind": "python", "entry_point": "a:b", "name": "gsm8k"}]}, "kind python has no rule to name"),
    ({"rewards": [{"kind": "verifier", "name": "gsm8k", "options": {"a": 1}}]}, "only kind python takes them"),
    ({"guards.action": "rollback"}, "guards.action is rollback, but checkpoint.every_steps is 0"),
    ({"data.prompt_template": "no place"}, "data.prompt_template is 'no place', but must contain `{prompt}`"),
    ({"data.path": []}, "data.path is an empty list"),
    ({"actor.optimizer": {"lr": 1e-5, "min_lr": 1e-4}}, "actor.optimizer.min_lr is 0.0001, but must not exceed lr 1e-05"),
]  # fmt: skip
GOOD: list[dict[str, Any]] = [
    {}, {"guards": {"action": "rollback"}, "checkpoint.every_steps": 5}, {"steps": 4, "ppo.critic_warmup_steps": 3},
    {"overlap": {"inter": False, "delta": {"initial": 9, "max": 2}}}, {"overlap": {"backfill": 96}},
    {"rewards": [{"kind": "python", "entry_point": "pkg.mod:f", "options": {"a": 1}}]}, {"rollout.forced_lengths": [20, 1.0]},
    {"rollout.forced_lengths": [__file__, "ContextTokens"]},
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), [*BROKEN, *((each, None) for each in GOOD)], ids=lambda value: str(value)[:50])
def test_broken_rule_is_the_one_problem(settings: dict[str, Any], changes: dict[str, Any], expected: str | None) -> None:
    problems = problems_of(settings, changes)
    assert problems == [] if expected is None else len(problems) == 1 and expected in problems[0], problems


def test_reward_model_must_be_used_once(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["reward"] = {"checkpoint": tmp_path / "actor"}
    assert "no part of rewards has kind model" in problems_of(settings)[0]
    assert problems_of(settings, {"rewards": [{"kind": "model"}, {"kind": "verifier", "name": "arithmetic"}]}) == []
    for parts in ([{"kind": "model"}, {"kind": "model", "weight": 2}], [{"kind": "process"}, {"kind": "model"}]):
        assert "names the reward model 2 times" in problems_of(settings, {"rewards": parts})[0]


def test_what_a_process_reward_model_goes_with(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["rewards"] = [{"kind": "process", "step_rewards": "sum"}]
    assert "`reward` is missing" in problems_of(settings)[0]
    assert problems_of(settings, {"reward": {"checkpoint": tmp_path / "actor"}}) == []
    (problem,) = problems_of(settings, {"ppo.reward_normalization": "batch"})
    assert "does not scale the rewards of steps (step_rewards sum)" in problem
    assert problems_of(settings, {"rewards.0.step_rewards": "min"}) == []
    (problem,) = problems_of(settings, {"evaluation": {"data": settings["data"], "metrics": [{"kind": "model"}]}})
    assert "evaluation.metrics has a part of kind model, but `rewards` one of kind process" in problem


def test_missing_path_names_its_nearest_sibling(settings: dict[str, Any], tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = {"tokenizer.path": "tok.modl", "actor.checkpoint": "acter", "data.path": "row.jsonl"}
    assert sorted(problems_of(settings, {key: tmp_path / name for key, name in missing.items()})) == sorted(
        f"{key} `{tmp_path / name}` does not exist; did you mean `{tmp_path / nearest}`?"
        for (key, name), nearest in zip(missing.items(), ("tok.model", "actor", "rows.jsonl"), strict=True)
    )
    assert any("`.` has no `zzzzzzzz`" in problem for problem in problems_of(settings, {"tokenizer.path": "zzzzzzzz/x.model"}))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert any(f"nothing can be written in `{settings['run_dir'].parent}`" in problem for problem in problems_of(settings))


def test_all_broken_rules_come_at_once_and_stop_ids_are_of_the_vocabulary(settings: dict[str, Any]) -> None:
    put(settings, "rollout.stop", [9, 64, 63])
    (problem,) = check_stop_ids(TrainConfig.model_validate(settings).rollout, 64)
    assert problem.startswith("rollout.stop has 64, but the actor's vocabulary ends at 63")
    assert len(problems_of(settings, {"ppo.minibatches": 3, "overlap.delta.max": 33, "data.path": []})) == 3


def supervised(settings: dict[str, Any]) -> dict[str, Any]:
    common = {key: settings[key] for key in ("run_dir", "tokenizer")} | {"data": {"path": settings["data"]["path"]}}
    return {**common, "model": {"checkpoint": settings["actor"]["checkpoint"]}, "max_tokens": 64}


@pytest.mark.parametrize(("change", "expected"), [
    (lambda s: s["model"].clear(), "model has neither"),
    (lambda s: s.update(runtime={"micro_batch_tokens": 63}), "one sequence may have 64 tokens (max_tokens)"),
    (lambda s: s["data"].update(completion_template="x"), "data.completion_template is 'x'"),
    (lambda s: s.update(optimizer={"lr": 1.0, "min_lr": 2.0}), "optimizer.min_lr is 2.0"),
    (lambda s: s.update(run_dir=s["tokenizer"]["path"]), "is a file, but must be a folder"),
    (lambda s: s.update(run_dir=s["tokenizer"]["path"] / "run"), "nothing can be written in"),
])  # fmt: skip
def test_supervised_rules(settings: dict[str, Any], change: Callable[[dict[str, Any]], None], expected: str) -> None:
    good = supervised(settings)
    assert check_supervised(SFTConfig.model_validate(good)) == []
    change(good)
    problems = check_supervised(SFTConfig.model_validate(good))
    assert len(problems) == 1 and expected in problems[0]


@pytest.mark.parametrize(("weights", "named"), [
    (["weights"], "name `run/weights`"),
    (["weights/critic", "weights/actor"], "name `run/weights/actor` or `run/weights/critic`"),
    (["checkpoints/step-000002/models/model"], "name `run/checkpoints/step-000002/models/model`"),
    ([], "`run` is the directory of a run without such weights"),
])  # fmt: skip
def test_a_run_in_the_place_of_a_model(tmp_path: Path, monkeypatch: MonkeyPatch, weights: list[str], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in weights:
        Path("run", folder).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "adapter_config.json", "adapter_model.safetensors"):
            Path("run", folder, name).write_text("{}")
    Path("run/tokenizer").mkdir(parents=True)  # by its name alone no file of a tokenizer
    Path("run/config.yaml").write_text("{}")
    for read in (lambda: read_hf_config(ModelConfig(checkpoint=Path("run"))), lambda: read_adapter_config(Path("run"))):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert named in str(caught.value)
    with pytest.raises(ConfigError, match="holds no tokenizer") as refused:
        load_tokenizer(TokenizerConfig(path=Path("run")))
    assert not weights or named in str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    save_tiny(root / "model", "qwen2", vocab_size=320)
    save_tiny(root / "other", "qwen2", vocab_size=321)
    save_tiny(root / "critic", "qwen2", "scalar", vocab_size=320)
    save_byte_level(root, ["1+1=2"])
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}) + "\n")
    return root


def dpo_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run_dir": folder / "run", "tokenizer": {"path": folder}, "data": {"path": folder / "rows.jsonl"},
        "model": {"checkpoint": folder / "model"}, "max_tokens": 64, "runtime": {"device": "cpu", "micro_batch_tokens": 128},
        **changes,
    }  # fmt: skip


def config(loss: str, folder: Path, **changes: Any) -> DPOConfig:
    return DPOConfig.model_validate(dpo_settings(folder, dpo={"loss": loss, **changes.pop("dpo", {})}, **changes))


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_defaults(loss: str, folder: Path) -> None:
    chosen = config(loss, folder)
    assert supervised_problems(chosen) == []
    assert chosen.optimizer.lr == 1e-6 and chosen.dpo.beta == 0.1
    assert config(loss, folder, model={"checkpoint": folder / "model", "lora": {"rank": 2}}).optimizer.lr == 1e-5
    half = config(loss, folder, reference={"checkpoint": folder / "model"}, runtime={"dtype": "bfloat16", "device": "cpu"})
    assert half.reference is not None and half.reference.dtype == "bfloat16" == half.model.dtype
    assert supervised_problems(config("apo_zero_unpaired", folder, batch_size=1)) == [], "of one row, which needs no others"


@pytest.mark.parametrize(("loss", "change", "words"), [
    ("sigmoid", {"runtime": {"device": "cpu", "micro_batch_tokens": 127}}, "is 127, but a pair may have 128 tokens (twice"),
    ("robust", {}, "dpo.loss is robust, but dpo.label_smoothing is 0, so that it is sigmoid"),
    ("ipo", {"dpo": {"label_smoothing": 0.1}}, "is 0.1, but dpo.loss ipo has none; remove it"),
    ("hinge", {"dpo": {"label_smoothing": 0.1}}, "dpo.loss hinge has none"),
    ("hinge", {"dpo": {"unwanted": 2}}, "dpo.unwanted is 2.0, but dpo.loss hinge is of pairs and does not read it"),
    ("kto", {"dpo": {"average": True}}, "dpo.average is true, but dpo.loss kto is of single completions and does not"),
    ("kto", {"batch_size": 1}, "batch_size is 1, but dpo.loss kto compares rows of a batch"),
    ("ipo", {"reference": {"checkpoint": "FOLDER/other"}}, "its vocabulary has 321 entries, the model's has 320"),
    ("ipo", {"reference": {"checkpoint": "FOLDER/none"}}, "reference.checkpoint `FOLDER/none` does not exist"),
    ("ipo", {"reference": {"checkpoint": "FOLDER/critic"}}, "reference: its checkpoint is a Qwen2ForSequenceClassification"),
    ("kto", {"reference_logprobs": "FOLDER"}, "reference_logprobs is FOLDER, which is a folder; name a file in it"),
    ("ipo", {"evaluation": {"fraction": 0.5}, "early_stop": {"metric": "los"}}, "early_stop.metric is 'los'"),
])  # fmt: skip
def test_what_is_refused(loss: str, change: dict[str, Any], words: str, folder: Path) -> None:
    placed = json.loads(json.dumps(change).replace("FOLDER", str(folder)))
    problems = supervised_problems(config(loss, folder, **placed))
    assert len(problems) == 1 and words.replace("FOLDER", str(folder)) in problems[0]


@pytest.mark.parametrize(
    "rule", [{"beta": 0}, {"beta": -0.1}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"nll": -1}, {"wanted": 0}]
)
def test_numbers_out_of_range(rule: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValidationError, match=rf"dpo\.{next(iter(rule))}"):
        config("sigmoid", folder, dpo=rule)


def test_a_pair_counts_twice_in_the_plan_of_memory(folder: Path) -> None:
    few = {"batch_size": 1, "runtime": {"device": "cpu", "micro_batch_tokens": 4096}}
    (pair,), (row,) = (supervised_holdings(config(loss, folder, **few), on_cpu=False) for loss in ("sigmoid", "kto"))
    (sft,) = supervised_holdings(SUPERVISED["sft"].model_validate(dpo_settings(folder, **few)), on_cpu=False)
    assert row.memory == sft.memory
    assert pair.memory.activations == pytest.approx(2 * row.memory.activations, rel=0.05)


@pytest.mark.parametrize(("kind", "change"), [
    ("dpo", {"dpo": {"beta": 0.2}}), ("rm", {"separator": "x"}), ("rm", {"data": {"path": "d", "columns": {"labels": "l"}}}),
    ("rm", {}),  # its first row has a chosen answer
    ("sft", {"data": {"path": "d"}}),
])  # fmt: skip
def test_the_command_of_a_file_is_known_by_its_keys(kind: str, change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    tree = json.loads(json.dumps(dpo_settings(folder, **change), default=str))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    assert guess_kind(tmp_path / "x.yaml") == kind
    rm = SUPERVISED["rm"].model_validate(dpo_settings(folder, data={"path": folder / "rows.jsonl", "columns": {"labels": "l"}}))
    assert any("separator is null; set it" in problem for problem in supervised_problems(rm))
