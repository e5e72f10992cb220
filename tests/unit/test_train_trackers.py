"""Trackers get numbers only, and a library that is missing is a clear error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.trackers import Tracker, open_trackers


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
    tracker = Tracker(sinks)
    fields = {
        "step": 3,
        "loss": 1.5,
        "tokens": 7,
        "why": "slope",
        "flag": True,
        "none": None,
        "ids": [1],
        "idle_s": {"actor": 0.5},
    }
    tracker.log(3, fields)
    tracker.close()
    for sink in sinks:
        assert sink.logged == [(3, {"loss": 1.5, "tokens": 7.0, "idle_s/actor": 0.5})]
        assert sink.closed


def test_nothing_asked_for_opens_nothing(tmp_path: Path) -> None:
    tracker = open_trackers(LoggingConfig(), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert tracker.sinks == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_trackers(LoggingConfig(tensorboard=True), tmp_path)
    for step, loss in ((1, 2.0), (2, 1.0)):
        tracker.log(step, {"loss": loss})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


def test_wandb_through_its_own_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("finish")
    )

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    tracker = open_trackers(LoggingConfig(wandb_project="rlhf"), tmp_path / "run7")
    tracker.log(4, {"loss": 0.5, "text": "x"})
    tracker.close()
    assert calls == [{"project": "rlhf", "name": "run7", "dir": str(tmp_path / "run7")}, (4, {"loss": 0.5}), "finish"]


@pytest.mark.parametrize(
    ("config", "module", "remedy"),
    [
        (LoggingConfig(wandb_project="rlhf"), "wandb", "pip install wandb"),
        (LoggingConfig(tensorboard=True), "torch.utils.tensorboard", "pip install tensorboard"),
    ],
)
def test_a_missing_library_names_setting_and_remedy(
    config: LoggingConfig, module: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"(?s)logging\..*{remedy}"):
        open_trackers(config, tmp_path)
