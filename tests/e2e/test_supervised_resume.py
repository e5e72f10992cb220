"""`oppo sft` and `oppo rm` are interrupted, continued and extended: the same run to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.errors import EXIT_REQUEUE, CheckpointError
from oppo_megatron.policy.finding import find_policy
from oppo_megatron.rundir.checkpoints import CheckpointStore
from tests.e2e.supervised import metrics, run, settings
from tests.e2e.test_supervised_matrix import require_equal

DATED = "{{ strftime_now('%d %b %Y') }}: {% for message in messages %}{{ message.content + '=' }}{% endfor %}"


def test_a_finished_run_is_given_more_steps(inputs: Path, tmp_path: Path) -> None:
    steps = {"optimizer": {"lr": 5e-3}, "batch_size": 8, "epochs": 4}
    run("sft", settings(inputs, "sft", tmp_path / "whole", **steps, steps=7))
    chosen = settings(inputs, "sft", tmp_path / "more", **steps, checkpoint={"every_steps": 2, "asynchronous": True})
    run("sft", {**chosen, "steps": 4})
    resumed = {**chosen, "checkpoint": {**chosen["checkpoint"], "resume": True}}
    with pytest.raises(CheckpointError, match="nothing to train"):
        run("sft", {**resumed, "steps": 4})
    with pytest.raises(CheckpointError, match="seed"):
        run("sft", {**resumed, "seed": 9, "steps": 7})
    other = tmp_path / "other.model"
    train_sentencepiece((inputs / "sft.jsonl").read_text().splitlines(), other, 310)
    with pytest.raises(CheckpointError, match="resume with the same data, tokenizer and template"):
        run("sft", {**resumed, "tokenizer": {"path": other}, "steps": 7})
    run("sft", {**resumed, "steps": 7})
    require_equal(tmp_path / "more", tmp_path / "whole")
    assert (tmp_path / "more" / "ended-step-000004" / "weights").is_dir()
    kept = [position.step for position in CheckpointStore(tmp_path / "more" / "checkpoints").positions()]
    assert kept == [6, 7], "checkpoint.keep is 2, and the last step is saved"


def test_a_run_goes_on_the_next_day_under_a_template_that_prints_the_date(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, config, today = tmp_path / "chats.jsonl", tmp_path / "sft.yaml", datetime(2026, 5, 4, 23, 59)
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    tokenizer = {"path": inputs / "tokenizer.model", "chat_template": DATED}
    chosen = settings(inputs, "sft", tmp_path / "run", data={"path": rows}, tokenizer=tokenizer, batch_size=4, epochs=4)
    config.write_text(yaml.safe_dump(json.loads(json.dumps(chosen, default=str))))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return today

    monkeypatch.setattr("oppo_megatron.cli.run.datetime", Clock)
    assert main(["sft", str(config), "steps=1"]) == 0
    today = datetime(2026, 5, 5, 0, 1)
    assert main(["sft", str(config), "steps=2", "--resume"]) == 0
    assert main(["sft", str(config), "steps=2", "--resume"]) == 0, "nothing to do"
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert find_policy(tmp_path / "run").tokenizer.date == datetime(2026, 5, 4, 23, 59)
    with pytest.raises(CheckpointError, match="resume with the same data, tokenizer"):
        other = {"tokenizer": TokenizerConfig(**tokenizer).dated(today), "checkpoint": {"resume": True}}
        run("sft", {**chosen, "steps": 3, **other})


def test_an_epoch_that_ended_with_a_short_batch_is_followed_by_another(inputs: Path, tmp_path: Path) -> None:
    optimizer = {"lr": 6e-3, "decay": "linear"}
    chosen = settings(inputs, "sft", tmp_path / "run", batch_size=10, optimizer=optimizer)
    first = run("sft", chosen)
    assert len(first) == 3
    lines = run("sft", {**chosen, "epochs": 2, "checkpoint": {"resume": True}})
    assert len(lines) == 6, "24 rows are left: batches of 10, 10 and 4"
    assert [line["lr"] for line in lines] == pytest.approx([6e-3, 4e-3, 2e-3, 3e-3, 2e-3, 1e-3])
    assert sum(line["tokens"] for line in lines) == 2 * sum(line["tokens"] for line in first)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_say_how_to_go_on(inputs: Path, tmp_path: Path, number: signal.Signals) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "sft.yaml"
    chosen = settings(inputs, "sft", run_dir, epochs=4000, batch_size=8, parallel={"dp": 2})
    config.write_text(yaml.safe_dump(json.loads(json.dumps(chosen, default=str))))
    command = [sys.executable, "-m", "oppo_megatron", "sft", str(config)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)}, start_new_session=True
    )
    until = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == EXIT_REQUEUE, told
    assert f"oppo sft: saved; continue with: oppo sft {config} --resume" in told
    assert not [*scratch.glob("oppo-*"), *scratch.glob("torchelastic*")], "nothing is left of the launcher"
    done = len(metrics(run_dir))
    more = [*command, "--resume", f"steps={done + 2}", "logging.console=plain"]
    again = subprocess.run(more, capture_output=True, text=True, timeout=240, check=False)
    assert again.returncode == 0, again.stderr
    assert f"continued from checkpoint step-{done:06d}" in again.stdout and "changed: steps" in again.stdout
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, done + 3))
