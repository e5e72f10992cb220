"""Suites of runs: nothing starts if one is wrong, runs take turns, finished ones are reused, equal work is found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import with_model
from oppo_megatron.bench.suite import BenchError, BenchStopped, Launch, Run, Suite, require_same_work, work_figures, work_lines
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError

SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 288, "max_position_embeddings": 128,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "run_dir": "runs/x", "tokenizer": {"path": "t.model"}, "data": {"path": "p.jsonl", "max_prompt_tokens": 64},
        "actor": {"init": SHAPE}, "critic": {"init": SHAPE}, "reward": {"init": SHAPE},
        "rewards": [{"kind": "model"}], "rollout": {"batch_size": 16, "max_response_tokens": 64, "forced_lengths": [16, 1.0]},
    }  # fmt: skip
    return TrainConfig.model_validate(plain | changes)


def line(step: int, step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "step_s": step_s, "decode_s": 1.0, "score_exposed_s": 0.5, "score_busy_s": 2.0, "train_s": 0.5,
        "idle_s": {"actor": 0.1, "scorer": 0.2}, "tokens": 100, "reward_mean": 0.1 * step, "delta": 4, "carried": 3,
        "stale_token_fraction": 0.25, "submitted_len_mean": 20.0, "trained_len_mean": 17.0, "ess": 0.9, "tail_waste": 0.5, **more,
    }  # fmt: skip


def runs_of(seconds: Sequence[float], **more: Any) -> list[Run]:
    return [Run(Path("run"), [line(n, s, **more) for n, s in enumerate(seconds, start=1)])]


def never(*_: object) -> int:
    raise AssertionError("nothing may start")


def quiet(out: Path, repeats: int, launch: Launch = never, resume: bool | None = None) -> Suite:
    return Suite(out, repeats, launch, say=lambda _: None, resume=resume)


def test_nothing_starts_where_a_run_cannot_fit_the_machine(tmp_path: Path, real_config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"large: weights.* of all ranks take [\d,.]+ GiB on this machine"):
        quiet(tmp_path, 1).run({"small": real_config, "large": with_model(real_config, 300)})


def test_a_wrong_run_is_refused_and_a_finished_one_not_overwritten(tmp_path: Path, real_config: TrainConfig) -> None:
    suite = quiet(tmp_path / "out", 2)
    with pytest.raises(ConfigError, match="only: tokenizer.path"):
        suite.run({"only": config()})
    (tmp_path / "out" / "a-2").mkdir(parents=True)
    (tmp_path / "out" / "a-2" / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="a-2 holds a finished run"):
        suite.run({"a": real_config})
    saved = tmp_path / "out" / "b-1" / "checkpoints" / "step-000002-clock-00000009"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="b-1 holds the checkpoints of an unfinished run"):
        suite.run({"b": real_config})


def test_runs_take_turns_and_a_failed_one_ends_the_benchmark(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []

    def launch(kind: str, config: TrainConfig, ranks: int) -> int:
        assert kind == "train" and ranks == 2
        started.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        return {"c-1": 1, "d-1": EXIT_REQUEUE}.get(config.run_dir.name, 0)

    runs = quiet(tmp_path, 2, launch).run({"a": real_config, "b": real_config})
    assert started == ["a-1", "b-1", "a-2", "b-2"]
    assert [run.lines for run in runs["b"]] == [[{"step": 1}]] * 2
    with pytest.raises(BenchError, match="c-1 ended with exit code 1"):
        quiet(tmp_path, 1, launch).run({"c": real_config})
    said: list[str] = []
    with pytest.raises(BenchStopped, match="the run d was asked to stop"):
        Suite(tmp_path, 1, launch, said.append, resume=False).run(dict.fromkeys(("e", "d", "f"), real_config))
    assert said[-1] == (
        f"--- 1 of 3 runs are finished and stay in {tmp_path}, each with its metrics.jsonl; "
        "nothing is compared yet; continue with the same command and --resume"
    )


def test_an_interrupted_benchmark_continues_with_the_missing_runs(tmp_path: Path, real_config: TrainConfig) -> None:
    started: list[str] = []

    def launch(kind: str, config: TrainConfig, ranks: int) -> int:
        started.append(config.run_dir.name)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "metrics.jsonl").write_text(f'{{"step": {len(started)}}}\n')
        if started == ["a-1", "b-1"]:
            return 1
        dump_config(config, config.run_dir / "config.yaml")
        (config.run_dir / "summary.json").write_text("{}")
        return 0

    configs = {"a": real_config, "b": real_config}
    with pytest.raises(BenchError, match="b-1"):
        quiet(tmp_path, 2, launch).run(configs)
    with pytest.raises(ConfigError, match="a-1 holds a finished run, .* take it as it is with --resume"):
        quiet(tmp_path, 2, launch, resume=False).run(configs)
    other = {"a": real_config.model_copy(update={"seed": 77}), "b": real_config}
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        quiet(tmp_path, 2, launch, resume=True).run(other)
    written = tmp_path / "a-1" / "config.yaml"
    lost = written.rename(tmp_path / "lost.yaml")
    with pytest.raises(ConfigError, match="a-1 holds a finished run of another configuration"):
        quiet(tmp_path, 2, launch, resume=True).run(configs)
    lost.rename(written)
    said: list[str] = []
    runs = Suite(tmp_path, 2, launch, said.append, resume=True).run(configs)
    assert started == ["a-1", "b-1", "b-1", "a-2", "b-2"] and f"finished before: {tmp_path / 'a-1'}" in said
    assert [run.lines[0]["step"] for run in (*runs["a"], *runs["b"])] == [1, 4, 3, 5]


def test_equal_work_is_judged_by_decoded_tokens() -> None:
    same = {"a": runs_of([1.0, 2.0]), "b": runs_of([3.0, 1.0]) * 2}
    found = work_figures(same)
    assert found == {"same_work": True, "decoded_tokens": {"a": [200], "b": [200, 200]}}
    assert work_lines(found) == ["the same work: 200 decoded tokens in every run"]
    require_same_work(config(), found)
    other = work_figures(same | {"c": runs_of([1.0])})
    assert not other["same_work"] and "a 200, b 200 200, c 100" in work_lines(other)[0]
    require_same_work(config(rollout={"batch_size": 16, "max_response_tokens": 64}), other)
    with pytest.raises(BenchError, match="lengths were forced, but this is NOT the same work"):
        require_same_work(config(), other)


@pytest.fixture
def real_config(tmp_path: Path) -> TrainConfig:
    tokenizer, prompts = write_random_prompts(tmp_path / "inputs", 8)
    return config(tokenizer={"path": tokenizer}, data={"path": prompts, "max_prompt_tokens": 8})
