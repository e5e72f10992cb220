"""Trackers get numbers only, and a library that is missing is a clear error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.logs.trackers import Tracker, check_trackers, open_trackers


class ListSink:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.logged.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed = True


def test_every_sink_gets_the_numeric_fields() -> None:
    sinks = [ListSink(), ListSink()]
    tracker = Tracker([(sink.log, sink.close) for sink in sinks])
    fields = {
        "step": 3, "loss": 1.5, "tokens": 7, "why": "slope", "flag": True, "none": None, "ids": [1], "idle_s": {"actor": 0.5}
    }  # fmt: skip
    tracker.log(3, fields)
    tracker.close()
    for sink in sinks:
        assert sink.logged == [(3, {"loss": 1.5, "tokens": 7.0, "idle_s/actor": 0.5})]
        assert sink.closed


def test_nothing_asked_for_opens_nothing(tmp_path: Path) -> None:
    tracker = open_trackers(LoggingConfig(), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert tracker.sinks == [] and list(tmp_path.iterdir()) == []


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_trackers(LoggingConfig(trackers=["tensorboard"]), tmp_path)
    for step, loss in ((1, 2.0), (2, 1.0)):
        tracker.log(step, {"loss": loss})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


class FakeWandb(SimpleNamespace):
    Error = RuntimeError

    def __init__(self, refusal: str | None = None) -> None:
        super().__init__(calls=[], refusal=refusal)

    def init(self, **options: Any) -> SimpleNamespace:
        if self.refusal:
            raise self.Error(self.refusal)
        self.calls.append(options)
        return SimpleNamespace(
            id=options["id"] or "made-up-id",
            log=lambda numbers, step: self.calls.append((step, numbers)),
            finish=lambda: self.calls.append("finish"),
        )


def test_wandb_through_its_own_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_dir = tmp_path / "run7"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("steps: 3\n")
    config = LoggingConfig(trackers=["wandb:rlhf"])
    tracker = open_trackers(config, run_dir)
    tracker.log(4, {"loss": 0.5, "text": "x"})
    tracker.close()
    options = {
        "project": "rlhf", "name": "run7", "dir": str(run_dir), "id": None, "resume": "allow",
        "config": {"steps": 3},
    }  # fmt: skip
    assert fake.calls == [options, (4, {"loss": 0.5}), "finish"]
    open_trackers(config, run_dir).close()
    assert fake.calls[3]["id"] == "made-up-id", "a continued run goes on in the same place"


def test_wandb_that_refuses_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refusal="api_key not configured"))
    with pytest.raises(ConfigError, match="api_key not configured.*wandb login.*WANDB_MODE to offline"):
        open_trackers(LoggingConfig(trackers=["wandb:rlhf"]), tmp_path)


def test_a_folder_named_wandb_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="a folder here, not a package"):
        check_trackers(LoggingConfig(trackers=["wandb:rlhf"]))
    sys.modules.pop("wandb", None)


@pytest.mark.parametrize("kind", ["train", "sft", "rm"])
def test_a_missing_library_is_told_before_anything_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}\n')
    model = {"init": {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
                      "num_hidden_layers": 2, "num_attention_heads": 4}}  # fmt: skip
    settings: dict[str, Any] = {"run_dir": "run", "tokenizer": {"path": "tok"}, "logging": {"trackers": ["wandb:rlhf"]}}
    if kind == "train":
        settings |= {"steps": 3, "placement": {"mode": "single"}, "actor": model, "critic": model}
        settings |= {"data": {"path": "rows.jsonl", "max_prompt_tokens": 20}, "rewards": [{"kind": "verifier", "name": "gsm8k"}]}
        settings |= {"rollout": {"batch_size": 8, "max_response_tokens": 20}}
    else:
        settings |= {"data": {"path": "rows.jsonl"}, "model": model, "batch_size": 1, "steps": 1, "max_tokens": 64}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    assert main([kind, "c.yaml"]) == 2
    error = capsys.readouterr().err
    assert "pip install wandb" in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "module", "remedy"),
    [
        (LoggingConfig(trackers=["wandb:rlhf"]), "wandb", "pip install wandb"),
        (LoggingConfig(trackers=["tensorboard"]), "tensorboard", "pip install tensorboard"),
    ],
)
def test_a_missing_library_names_setting_and_remedy(
    config: LoggingConfig, module: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for step in (check_trackers, lambda logging: open_trackers(logging, tmp_path)):
        with pytest.raises(ConfigError, match=rf"(?s)logging\..*{remedy}"):
            step(config)
