"""Progress lines and trackers, Weights & Biases through its real library included."""

from __future__ import annotations

import importlib.util
import io
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from oppo_megatron.clock import format_duration
from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.logs.console import Progress, describe
from oppo_megatron.train.logs.trackers import Tracker, check_trackers, open_trackers
from tests.support.commands import LEAST, enter, refused

WANDB = LoggingConfig(trackers=["wandb:rlhf"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(total: int | None, num_steps: int, step_s: float) -> list[str]:
    stream, clock = io.StringIO(), SimpleNamespace(now=0.0)
    with Progress("plain", total, "ppo", stream, lambda: clock.now) as progress:
        for step in range(1, num_steps + 1):
            clock.now += step_s
            progress.update(step, {"reward_mean": step / 10})
    return stream.getvalue().splitlines()


def test_plain_lines_are_throttled_but_first_and_last_are_there() -> None:
    assert [line.split()[1] for line in run(10, 10, step_s=0.5)] == ["1/10", "5/10", "9/10", "10/10"]
    assert run(3, 3, step_s=60.0) == ["ppo 1/3  reward 0.100", "ppo 2/3  ETA 1m00s  reward 0.200", "ppo 3/3  reward 0.300"]
    for total in (None, 20):
        first, last = run(total, 7, step_s=0.01)  # a run that ends early
        assert first.startswith("ppo 1") and last.startswith("ppo 7") and last.endswith("reward 0.700")


def test_off_is_silent_and_auto_looks_at_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Progress("off", 2, "ppo", stream) as progress:
        progress.note("hello")
        progress.update(1, {"reward_mean": 1.0})
    assert stream.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert Progress("auto", 1, "ppo", Terminal()).mode == "live"
    assert Progress("auto", 1, "ppo", io.StringIO()).mode == "plain"
    monkeypatch.setenv("TERM", "dumb")
    assert Progress("auto", 1, "ppo", Terminal()).mode == "plain"


def test_live_shows_the_line_and_notes_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with Progress("live", 3, "[sft]", stream) as progress:
        progress.note("[note] 1 row refused")
        progress.update(2, {"loss": 1.25, "accuracy": 0.5, "tokens_per_s": 12345, "delta": 3, "chunk_tokens": 16, "kl_mean": 0.1})
    shown = stream.getvalue()
    assert "[note] 1 row refused" in shown and "[sft] 2/3  loss 1.2500  acc 50.0%  tok/s 12.3k" in shown
    assert "KL" not in shown  # cut at the edge of the terminal, not wrapped


def test_describe_derives_rates_and_shares() -> None:
    line = {
        "reward_mean": 0.5, "tokens": 1000, "step_s": 2.0, "score_exposed_s": 0.5, "score_busy_s": 2.0, "delta": 4,
        "deferred": {"0": 28, "1": 3, "2": 1}, "chunk_tokens": 32, "kl_mean": 0.0123, "unknown": 1,
    }  # fmt: skip
    assert describe(line) == ["reward 0.500", "tok/s 500", "hidden 75%", "deferred 4", "delta 4", "chunk 32", "KL 0.0123"]
    missing = {"reward_mean": None, "tokens": 5, "step_s": 0.0, "score_exposed_s": 1.0, "score_busy_s": None}
    assert describe(missing) == [] and describe({"loss": 0.5, "accuracy": 1.0}) == ["loss 0.5000", "acc 100.0%"]
    # a step whose whole batch was carried decodes nothing, and has no rate
    assert describe({"reward_mean": 0.5, "tokens": 0, "step_s": 2.0}) == ["reward 0.500"]
    assert [format_duration(s) for s in (0, 59.4, 60, 187, 3599.6, 7500)] == ["0s", "59s", "1m00s", "3m07s", "1h00m", "2h05m"]


def test_every_sink_gets_the_numeric_fields_and_without_one_nothing_is_opened(tmp_path: Path) -> None:
    calls: list[Any] = []
    tracker = Tracker([(lambda *logged: calls.append(logged), lambda: calls.append("closed"))] * 2)
    others = {"step": 3, "why": "slope", "flag": True, "none": None, "ids": [1]}
    tracker.log(3, {"loss": 1.5, "tokens": 7, "idle_s": {"actor": 0.5}, **others})
    tracker.close()
    assert calls == [(3, {"loss": 1.5, "tokens": 7.0, "idle_s/actor": 0.5})] * 2 + ["closed"] * 2
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


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run7").mkdir()
    (tmp_path / "run7" / "config.yaml").write_text("steps: 2\n")
    return tmp_path / "run7"


def test_wandb_through_its_own_interface(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        log, finish = (lambda numbers, step: calls.append((step, numbers))), (lambda: calls.append("finish"))
        return SimpleNamespace(id=options["id"] or "made-up-id", log=log, finish=finish)

    def refuse(**_: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=RuntimeError, init=init))
    tracker = open_trackers(WANDB, run_dir)
    tracker.log(4, {"loss": 0.5, "text": "x"})
    tracker.close()
    options = {"project": "rlhf", "name": "run7", "dir": str(run_dir), "id": None, "resume": "allow", "config": {"steps": 2}}
    assert calls == [options, (4, {"loss": 0.5}), "finish"]
    open_trackers(WANDB, run_dir).close()
    assert calls[3]["id"] == "made-up-id", "a continued run goes on in the same place"
    sys.modules["wandb"].init = refuse
    with pytest.raises(ConfigError, match="api_key not configured.*wandb login.*WANDB_MODE to offline"):
        open_trackers(WANDB, run_dir)


def test_a_folder_named_wandb_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="a folder here, not a package"):
        check_trackers(WANDB)
    sys.modules.pop("wandb", None)


@pytest.mark.parametrize("kind", ["train", "sft", "rm"])
def test_a_missing_library_is_told_before_anything_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings: dict[str, Any] = yaml.safe_load(LEAST)
    if kind != "train":
        settings = {"data": {"path": "rows.jsonl"}, "model": settings.pop("actor"), "batch_size": 1, "steps": 1, "max_tokens": 64}
    common = {"run_dir": "run", "tokenizer": {"path": "tok"}, "logging": {"trackers": ["wandb:rlhf"]}}
    enter(tmp_path, monkeypatch, yaml.safe_dump(settings | common))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2", "chosen": "2", "rejected": "3", "answer": "2"}\n')
    assert "pip install wandb" in refused(capsys, kind, "c.yaml") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", ["wandb", "tensorboard"])
def test_a_missing_library_names_setting_and_remedy(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = LoggingConfig(trackers=["wandb:rlhf" if module == "wandb" else module])
    for step in (check_trackers, lambda logging: open_trackers(logging, tmp_path)):
        with pytest.raises(ConfigError, match=rf"(?s)logging\..*pip install {module}"):
            step(config)


def records(data: bytes) -> Iterator[bytes]:
    """Records in a file: seven bytes of head, then LevelDB's log format, blocks of 32 KiB of pieces."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def history(run_dir: Path) -> list[dict[str, str]]:
    """The rows that the run's offline file holds, by wandb's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows


RUN = """
import sys
from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.train.logs.trackers import open_trackers

tracker = open_trackers(LoggingConfig(trackers=["wandb:rlhf"]), sys.argv[1])
for step in (1, 2):
    tracker.log(step, {"reward_mean": 0.5 * step, "idle_s": {"actor": 0.25}, "delta_reason": "text"})
    tracker.log(step, {"critic_update_s": 3.0})
tracker.close()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="no wandb: `make test-wandb` installs it aside and runs this"
)
def test_offline_files_hold_the_values(run_dir: Path) -> None:
    """A process of its own, as a run is: wandb's service writes the last values when that ends."""
    subprocess.run([sys.executable, "-c", RUN, str(run_dir)], check=True, capture_output=True, timeout=60)
    rows = [{key: float(value) for key, value in row.items() if key[0] != "_"} for row in history(run_dir)]
    assert rows == [{"reward_mean": 0.5 * step, "idle_s/actor": 0.25, "critic_update_s": 3.0} for step in (1, 2)]
    assert (run_dir / "wandb" / "run_id").read_text().strip() in str(next(run_dir.glob("wandb/offline-run-*")))
