"""`oppo sft` and `oppo rm` measure held-out rows: as transformers does, on every layout; the best step is named and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.supervised_rows import split_rows
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.rundir.checkpoints import CheckpointStore
from tests.e2e.supervised import COLUMNS, Settings, hf_model, metrics, reference_loss, run, settings, token_rows
from tests.support.hf import tensors_of
from tests.support.ranks import run_ranks

HALF = {"fraction": 0.5, "every_steps": 1}


def summary(run_dir: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return tree


def held(inputs: Path, kind: str, fraction: float = 0.5, seed: int = 1) -> list[tuple[list[int], list[list[int]]]]:
    rows = [(prompt, *answers) for prompt, answers in token_rows(inputs, kind)]
    return [(prompt, answers) for prompt, *answers in split_rows(rows, fraction, seed)[1]]


def right(model: Any, kind: str, rows: list[tuple[list[int], list[list[int]]]]) -> float:
    """Accuracy: of tokens that are the likeliest, of pairs that are scored in the right order."""
    hits: list[torch.Tensor] = []
    for prompt, answers in rows:
        outputs = [model(torch.tensor([[*prompt, *answer]])).logits for answer in answers]
        if kind == "sft":
            hits.append(outputs[0][0, len(prompt) - 1 : -1].argmax(-1) == torch.tensor(answers[0]))
        else:
            hits.append(outputs[0][0] > outputs[1][0])
    return float(torch.cat(hits).double().mean())


@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_held_out_figures_are_those_of_transformers_and_none_of_the_rows_is_trained_on(
    inputs: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(inputs, kind, tmp_path / "run", epochs=2, batch_size=6, evaluation=HALF)
    rows = held(inputs, kind)
    lines = run(kind, chosen)
    assert len(lines) == 4 and len(rows) == 12
    told = summary(tmp_path / "run")
    assert told["rows"] == 12 and list(told["heldout"]) == ["0", "1", "2", "3", "4"]
    for step, weights in ("0", chosen["model"]["checkpoint"]), ("4", tmp_path / "run" / "weights"):
        model, mean = hf_model(kind, weights), told["heldout"][step]["mean"]
        with torch.no_grad():
            assert mean["loss"] == pytest.approx(float(reference_loss(model, kind, rows)), rel=1e-5)
            assert mean["accuracy"] == pytest.approx(right(model, kind, rows))
    assert lines[-1]["heldout"] == told["heldout"]["4"]["mean"] and "heldout" in lines[0]
    losses = {step: entry["mean"]["loss"] for step, entry in told["heldout"].items() if step != "0"}
    best = min(losses, key=lambda step: losses[step])
    assert told["best"] == {"step": int(best), "metric": "loss", "value": losses[best]}
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    files = tmp_path / "rest.jsonl"
    names = ["prompt", *COLUMNS[kind]]
    source = [json.loads(line) for line in Path(chosen["data"]["path"]).read_text().splitlines()]
    kept = {tuple(prompt) for prompt, _ in rows}
    left = [row for row in source if tuple(tokenizer.encode(row["prompt"])) not in kept]
    files.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in left))
    alone = {**chosen, "run_dir": tmp_path / "alone", "data": {**chosen["data"], "path": files}, "evaluation": None}
    run(kind, alone)
    ours, theirs = tensors_of(tmp_path / "run" / "weights"), tensors_of(tmp_path / "alone" / "weights")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the held-out rows have no part in training"


def worsening(inputs: Path, run_dir: Path, **changes: Any) -> Settings:
    """Twelve rows are learned by heart in 24 steps: the held-out loss turns up long before the last."""
    quick = {"lr": 3e-2, "eps": 1e-8, "clip_grad": 1.0}
    return settings(inputs, "sft", run_dir, batch_size=4, epochs=8, optimizer=quick, evaluation=HALF, **changes)


def test_the_best_step_is_kept_and_its_weights_are_written(inputs: Path, tmp_path: Path) -> None:
    chosen = worsening(inputs, tmp_path / "run", checkpoint={"keep_best": True, "keep": 1})
    run("sft", chosen)
    best = summary(tmp_path / "run")["best"]
    assert 1 <= best["step"] < 24, f"the case is none: {best}"
    steps = [position.step for position in CheckpointStore(tmp_path / "run" / "checkpoints").positions()]
    assert steps == [best["step"], 24]
    with torch.no_grad():
        loss = reference_loss(hf_model("sft", tmp_path / "run" / "best"), "sft", held(inputs, "sft"))
        last = reference_loss(hf_model("sft", tmp_path / "run" / "weights"), "sft", held(inputs, "sft"))
    assert float(loss) == pytest.approx(best["value"], rel=1e-5) and float(last) > float(loss)


def test_a_run_ends_early_and_is_the_same_when_it_is_interrupted(inputs: Path, tmp_path: Path) -> None:
    stop = {"early_stop": {"metric": "loss", "patience": 2}}
    run("sft", worsening(inputs, tmp_path / "whole", **stop))
    told = summary(tmp_path / "whole")
    assert told["stopped_early"] and told["steps"] < 24 and told["steps"] == told["best"]["step"] + 2
    assert len(metrics(tmp_path / "whole")) == told["steps"]
    parts = worsening(inputs, tmp_path / "parts", **stop)
    run_ranks(1, "tests.e2e.supervised_jobs:train", kind="sft", settings=parts, stop_after=2)
    run("sft", {**parts, "checkpoint": {"resume": True}})
    again = summary(tmp_path / "parts")
    for key in ("heldout", "best", "stopped_early", "steps"):
        assert again[key] == told[key]
    run("sft", {**parts, "early_stop": None, "checkpoint": {"resume": True}})
    assert summary(tmp_path / "parts")["stopped_early"] is None and len(metrics(tmp_path / "parts")) == 24


def test_memory_is_measured(inputs: Path, tmp_path: Path) -> None:
    chosen = settings(inputs, "sft", tmp_path / "run", batch_size=6, steps=1, evaluation=HALF)
    (line,) = run("sft", chosen)
    told = summary(tmp_path / "run")
    assert told["memory_peak_mb"][0] >= told["memory_base_mb"][0] > 0 and told["memory_planned_mb"][0] > 0
    assert line["memory_peak_mb"] <= told["memory_peak_mb"]
