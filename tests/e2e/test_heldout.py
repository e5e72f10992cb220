"""Held-out metrics of a run on two ranks, and the end that they bring; the same where it is interrupted and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from oppo_megatron.cli.main import main
from tests.support.ppo import SHAPE
from tests.support.tokenizers import save_byte_level

TEXTS = [f"{a} plus {b} = {a + b}" for a in range(20) for b in range(20)]
JUDGE = "def brevity(prompt, response, fields):\n    return -float(len(response))\n"


def write_job(folder: Path, **changes: Any) -> Path:
    save_byte_level(folder / "tokenizer", TEXTS, 320)
    (folder / "judge.py").write_text(JUDGE)
    rows = [{"prompt": text.split("=")[0], "answer": text.split()[-1]} for text in TEXTS[:64]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    role = {"init": {**SHAPE, "vocab_size": 320}}
    data = {"path": str(folder / "rows.jsonl"), "max_prompt_tokens": 64}
    job = {
        "run_dir": str(folder / "run"), "steps": 4, "placement": {"mode": "disaggregated"}, "data": data,
        "tokenizer": {"path": str(folder / "tokenizer")}, "actor": role, "critic": role, "reward": role,
        "rewards": [{"kind": "model"}], "overlap": {"delta": {"max": 2, "initial": 1}},
        "rollout": {"batch_size": 4, "max_response_tokens": 10},
        "evaluation": {
            "data": data | {"max_rows": 6}, "every_steps": 1,
            "metrics": [
                {"kind": "verifier", "name": "arithmetic"},
                {"kind": "model"}, {"kind": "python", "entry_point": "judge:brevity"},
                {"kind": "verifier", "name": "length", "buffer_tokens": 10}, {"kind": "verifier", "name": "math"},
            ],
        },
        "logging": {"trace": False},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job | changes))
    return path


def train(path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "oppo_megatron", "train", str(path), *words]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def summary_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path.parent / "run" / "summary.json").read_text()))


@pytest.mark.long
def test_every_kind_of_judge_is_measured_and_the_run_ends_early(tmp_path: Path) -> None:
    path = write_job(tmp_path, early_stop={"metric": "min accuracy", "patience": 2})
    told = train(path)
    summary = summary_of(path)
    assert summary["steps"] == 2 and summary["stopped_early"] in told
    assert "best" in summary["stopped_early"] and "at step 0" in summary["stopped_early"]
    metrics = {"accuracy", "model", "judge:brevity", "length", "math", "response_tokens", "truncated"}
    assert summary["heldout"].keys() == {"0", "1", "2"}
    assert all(entry["mean"].keys() == metrics for entry in summary["heldout"].values())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["heldout"] for line in lines] == [summary["heldout"][step]["mean"] for step in ("1", "2")]
    assert (tmp_path / "run" / "weights" / "actor" / "config.json").exists()


@pytest.mark.long
def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    stop = {"metric": "min accuracy", "patience": 3}
    path = write_job(tmp_path, early_stop=stop)
    train(path, "steps=2")
    assert summary_of(path)["stopped_early"] is None
    train(path, "steps=6", "--resume")
    summary = summary_of(path)
    assert summary["steps"] == 3 and "step 3" in summary["stopped_early"]
    assert summary["heldout"].keys() == {"0", "1", "2", "3"}


def test_the_step_that_is_best_by_a_held_out_metric_is_kept_and_its_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # for judge.py
    best = {"keep_best": "judge:brevity", "keep": 1}
    path = write_job(tmp_path, checkpoint=best, placement={"mode": "single"}, overlap={"inter": False, "intra": False})
    assert main(["train", str(path), "evaluation.data.max_rows=4", "actor.optimizer.lr=0.05"]) == 0
    told = capsys.readouterr().out
    summary = summary_of(path)
    values = {int(step): entry["mean"]["judge:brevity"] for step, entry in summary["heldout"].items() if step != "0"}
    for entry in summary["heldout"].values():
        assert entry["mean"]["length"] == pytest.approx(-entry["mean"]["response_tokens"] / 10), "counted in tokens"
    step = max(values, key=lambda n: (values[n], -n))
    assert summary["best"] == {"step": step, "metric": "judge:brevity", "value": values[step]}
    assert f"best step {step}: judge:brevity {values[step]:.4g}" in told
    run = tmp_path / "run"
    kept = {folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir()}
    assert kept == {f"step-{step:06d}", "step-000004"}
    checkpoint = run / "checkpoints" / f"step-{step:06d}" / "models" / "actor"
    assert main(["convert", str(checkpoint), str(tmp_path / "again")]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "best" / "actor", tmp_path / "again"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run / "best" / "critic" / "config.json").exists()
