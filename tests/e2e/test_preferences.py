"""`oppo dpo`, by DPO and by KTO: the steps of transformers and AdamW, layouts, what is reused, resumed, refused, and left."""

from __future__ import annotations

import math
import re
import shutil
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from oppo_megatron.cli.main import main
from oppo_megatron.clock import ByTime
from oppo_megatron.errors import CapacityError, CheckpointError, DataError
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.train import reference_pass, supervised
from oppo_megatron.train.supervised_tasks import PairPreferences
from tests.e2e.supervised import NUM_ROWS, SHAPE, Settings, hf_model, plain_steps, require_moved, run, settings, token_rows
from tests.support.hf import save_tiny, tensors_of
from tests.support.ranks import run_ranks

STEPS, BATCH = 3, 8
RATE = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "eps": 1e-4}
Answer = tuple[list[int], list[int]]


def preferring(inputs: Path, kind: str, run_dir: Path, rule: Settings | None = None, **changes: Any) -> Settings:
    usual = {
        "batch_size": BATCH, "steps": STEPS, "model": {"checkpoint": inputs / "qwen2"}, "optimizer": RATE,
        "dpo": {"loss": "sigmoid" if kind == "dpo" else kind, "beta": 0.3, **(rule or {})},
    }  # fmt: skip
    return settings(inputs, kind, run_dir, **usual | changes)


def logprob(model: Any, answer: Answer) -> Tensor:
    prompt, tokens = answer
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor(tokens)[:, None]).sum()


def pair_loss(rule: Settings) -> Callable[[Any, Any, list[Any]], Tensor]:
    """DPO's family, written out once more."""
    beta, share = rule["beta"], rule.get("label_smoothing", 0.0)

    def loss(model: Any, reference: Any, rows: list[Any]) -> Tensor:
        losses = []
        for prompt, answers in rows:
            with torch.no_grad():
                ours = [logprob(reference, (prompt, answer)) for answer in answers]
            logps = [logprob(model, (prompt, answer)) for answer in answers]
            sizes = [len(answer) if rule.get("average") else 1 for answer in answers]
            ratios = [(logp - mine) / size for logp, mine, size in zip(logps, ours, sizes, strict=True)]
            margin = ratios[0] - ratios[1]
            if rule.get("loss") == "ipo":
                each = (margin - 0.5 / beta).square()
            else:
                right, wrong = torch.sigmoid(beta * margin).log(), torch.sigmoid(-beta * margin).log()
                each = -(1 - share) * right - share * wrong
            losses.append(each - rule.get("nll", 0.0) * logps[0] / len(answers[0]))
        return torch.stack(losses).mean()

    return loss


def marked_loss(rule: Settings) -> Callable[[Any, Any, list[Any]], Tensor]:
    """KTO, written out once more; rows are (prompt, answer, wanted)."""
    beta = rule["beta"]

    def loss(model: Any, reference: Any, rows: list[Any]) -> Tensor:
        with torch.no_grad():
            before = [[rows[i - back] for back in range(1, len(rows))] for i in range(len(rows))]
            others = [
                (row[0], next(other[1] for other in earlier if other[0] != row[0]))
                for row, earlier in zip(rows, before, strict=True)
            ]
            point = max(0.0, sum(float(logprob(model, o) - logprob(reference, o)) for o in others) / len(others))
        losses = []
        for prompt, answer, wanted in rows:
            with torch.no_grad():
                mine = logprob(reference, (prompt, answer))
            ratio = logprob(model, (prompt, answer)) - mine
            value = torch.sigmoid(beta * (ratio - point if wanted else point - ratio))
            losses.append((rule["wanted"] if wanted else rule["unwanted"]) * (1 - value))
        return torch.stack(losses).mean()

    return loss


def marked(pairs: list[Any]) -> list[Any]:
    return [(prompt, answer, not place) for prompt, answers in pairs for place, answer in enumerate(answers)]


CASES = {
    "dpo": ("dpo", {"beta": 0.3}), "smoothed, with nll": ("dpo", {"beta": 0.3, "label_smoothing": 0.1, "nll": 0.5}),
    "ipo by means": ("dpo", {"beta": 0.3, "loss": "ipo", "average": True}),
    "kto": ("kto", {"beta": 0.3, "wanted": 1.0, "unwanted": 1.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_transformers_and_adamw(inputs: Path, tmp_path: Path, case: str) -> None:
    """Weights within 1e-5, where the steps have moved them by 1e-3 and more; against a reference of its own, other weights."""
    kind, rule = CASES[case]
    save_tiny(tmp_path / "other", "qwen2", vocab_size=320, tie_word_embeddings=True, seed=5)
    model, other = hf_model("sft", inputs / "qwen2"), hf_model("sft", tmp_path / "other")
    rows = token_rows(inputs, "rm")
    rows, loss_of = (rows, pair_loss(rule)) if kind == "dpo" else (marked(rows), marked_loss(rule))
    batches = [rows[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    expected = plain_steps(model, [lambda own, batch=batch: loss_of(own, other, batch) for batch in batches], RATE)
    heldout = {"data": {"path": inputs / "pairs.jsonl"}, "max_rows": BATCH}
    own: Settings = {"reference": {"checkpoint": tmp_path / "other"}, "evaluation": heldout}
    lines = run(kind, preferring(inputs, kind, tmp_path / "run", rule, **own))
    with torch.no_grad():
        left = float(loss_of(model, other, rows[:BATCH]))
    assert lines[-1]["heldout"]["loss"] == pytest.approx(left, rel=1e-4), "of the first rows, after the last step"
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    require_moved(tmp_path / "run" / "weights", model, inputs / "qwen2", 1e-5)
    if kind == "kto":
        assert [line["reference_point"] > 0 for line in lines] == [True] * STEPS, "z0 is cut off at 0: it is not tested"


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_micro_batches_have_no_influence(inputs: Path, tmp_path: Path, kind: str) -> None:
    small, large = (run(kind, preferring(inputs, kind, tmp_path / str(size), runtime=runtime(size))) for size in (240, 4096))
    assert small[-1]["packing_efficiency"] != large[-1]["packing_efficiency"], "both are packed alike: nothing is tested"
    for ours, theirs in zip(small, large, strict=True):
        for name in ("loss", "margin", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (name, ours["step"])
    weights = [tensors_of(tmp_path / str(budget) / "weights") for budget in (240, 4096)]
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 1e-5


def runtime(budget: int, **changes: Any) -> Settings:
    return {"device": "cpu", "micro_batch_tokens": budget, **changes}


def test_memory_that_a_pair_does_not_fit_ends_the_run(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(task: Any, batch: MicroBatch, logp_S: Tensor) -> dict[str, Tensor]:
        assert len(batch.lengths) == 2 * len(batch.index)
        raise MemoryError("no more")

    monkeypatch.setattr(PairPreferences, "columns", short)
    with pytest.raises(CapacityError, match=r"memory ran out in a training micro-batch of \d+ tokens \(no more\); set runt"):
        run("dpo", preferring(inputs, "dpo", tmp_path / "none", runtime=runtime(4096)))


class Loaded:
    """The models that runs load, by the folders that they come from, and whether a reference is held while a run trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.folders: list[str] = []
        self.models: list[weakref.ref[Any]] = []
        load, train = supervised.load_role, supervised.TrainedModel

        def noted(model: Any, *given: Any, **named: Any) -> Any:
            loaded = load(model, *given, **named)
            self.folders.append(model.checkpoint.name)
            self.models.append(weakref.ref(loaded))
            return loaded

        def trained(model: Any, *given: Any) -> Any:
            self.held = sum(each() is not None for each in self.models)
            return train(model, *given)

        monkeypatch.setattr(supervised, "load_role", noted)
        monkeypatch.setattr(supervised, "TrainedModel", trained)

    def take(self) -> list[str]:
        folders, self.folders, self.models = self.folders, [], []
        return folders


def test_the_reference_is_read_once_and_held_no_longer(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "other", "qwen2", vocab_size=320, tie_word_embeddings=True, seed=5)
    loaded, shown = Loaded(monkeypatch), {"logging": {"console": "plain"}}
    own = {"reference": {"checkpoint": tmp_path / "other"}, "reference_logprobs": tmp_path / "ref" / "logprobs.safetensors"}
    run("dpo", preferring(inputs, "dpo", tmp_path / "first", **own, **shown))
    assert loaded.take() == ["other", "qwen2"] and loaded.held == 1
    assert f"{2 * NUM_ROWS} of {2 * NUM_ROWS} answers computed" in capfd.readouterr().out
    assert not (tmp_path / "first" / "reference.safetensors").exists()
    run("dpo", preferring(inputs, "dpo", tmp_path / "second", **own, **shown))
    told = capfd.readouterr().out
    assert loaded.take() == ["qwen2"] and f"{2 * NUM_ROWS} answers found" in told and "computed" not in told
    first, second = (tensors_of(tmp_path / name / "weights") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    run("kto", preferring(inputs, "kto", tmp_path / "third", **own, **shown))
    told = capfd.readouterr().out
    assert loaded.take() == ["other", "qwen2"], "the mismatched rows of KTO are not among them"
    others = STEPS * BATCH // 2  # both rows of a pair have one prompt, and the same row before it
    assert f"{2 * NUM_ROWS} answers found" in told and f"{others} of {others} answers computed" in told
    with safe_open(own["reference_logprobs"], "pt") as file:
        assert len(file.get_tensor("logprobs")) == 2 * NUM_ROWS + others


def test_another_reference_is_not_taken_for_the_same(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "other", "qwen2", vocab_size=320, tie_word_embeddings=True, seed=5)
    chosen = preferring(inputs, "dpo", tmp_path / "run", steps=1, logging={"console": "plain"})
    run("dpo", chosen)
    kept = tmp_path / "run" / "reference.safetensors"
    named = {**chosen, "run_dir": tmp_path / "named", "reference_logprobs": kept}
    other = {"reference": {"checkpoint": tmp_path / "other"}}
    with pytest.raises(DataError, match=r"reference_logprobs: .* is of another reference: .*name another file"):
        run("dpo", named | other)
    with pytest.raises(CheckpointError, match=r"the reference \(its weights.*resume with the same `reference`"):
        run("dpo", chosen | other | {"steps": 2, "checkpoint": {"resume": True}})
    shutil.rmtree(tmp_path / "named")
    (tmp_path / "named").mkdir()
    shutil.copy(kept, tmp_path / "named")
    capfd.readouterr()
    del named["reference_logprobs"]
    run("dpo", named | other)
    told = capfd.readouterr().out
    assert "is of another reference" in told and "computed anew" in told and "48 of 48 answers computed" in told
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(DataError, match="is damaged"):
        run("dpo", named | {"run_dir": tmp_path / "last", "reference_logprobs": kept})


def test_a_fingerprint_is_of_weights_shape_and_type(inputs: Path, tmp_path: Path) -> None:
    for name in ("model", "changed", "told"):
        shutil.copytree(inputs / "qwen2", tmp_path / name)
    weights = tmp_path / "changed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    (tmp_path / "told" / "README.md").write_text("about it")
    models: list[Settings] = [
        {"checkpoint": tmp_path / "model"}, {"checkpoint": tmp_path / "told", "lora": {"rank": 2}},
        {"checkpoint": tmp_path / "changed"}, {"checkpoint": tmp_path / "model", "dtype": "bfloat16"}, {"init": SHAPE},
        {"init": SHAPE | {"rms_norm_eps": 1e-3}},
    ]  # fmt: skip
    first, second = run_ranks(2, "tests.e2e.supervised:fingerprints", models=models)
    assert first == second, "ranks read a share of the files each, and know the same"
    assert first[0] == first[1] and len(set(first[1:])) == len(first) - 1, "fresh adapters and notes change nothing"


def test_a_pass_that_is_killed_goes_on_where_it_was(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference_pass, "BLOCK", 10)
    monkeypatch.setattr(reference_pass, "ByTime", partial(ByTime, every_s=0.0))
    sums, calls = reference_pass.answer_sums, []

    def killed(*given: Any) -> list[float]:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sums(*given)

    monkeypatch.setattr(reference_pass, "answer_sums", killed)
    chosen = preferring(inputs, "dpo", tmp_path / "run", logging={"console": "plain"})
    with pytest.raises(KeyboardInterrupt):
        run("dpo", chosen)
    lines = run("dpo", chosen)
    told = capfd.readouterr().out
    assert "20 answers found" in told and len(calls) == 3 + 3, "blocks of 10, 10 and 8 were left"
    assert re.search(r"reference log-probs: about \d+ of \d+ answers computed, \d+s", told), "within a block"
    monkeypatch.undo()
    expected = run("dpo", preferring(inputs, "dpo", tmp_path / "whole"))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected])


def test_with_adapters_the_reference_is_the_model_without_them(inputs: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is the reference; pip install 'oppo-megatron[test]'")
    lora = {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "v_proj", "down_proj"]}
    base, rule = hf_model("sft", inputs / "qwen2"), {"beta": 0.3}
    start = tmp_path / "start"
    run_dir, model = tmp_path / "run", {"checkpoint": inputs / "qwen2", "lora": lora}
    run("dpo", preferring(inputs, "dpo", start, model=model, steps=1, optimizer={"lr": 1e-30}))
    adapters = peft.PeftModel.from_pretrained(deepcopy(base), start / "weights", is_trainable=True).get_base_model()
    rows, rate = token_rows(inputs, "rm"), {"lr": 1e-2, "eps": 1e-4, "clip_grad": 0.5}
    batches = [rows[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    losses = [lambda own, batch=batch: pair_loss(rule)(own, base, batch) for batch in batches]
    expected = [loss for loss, _ in plain_steps(adapters, losses, rate | {"weight_decay": 0.0})]
    lines = run("dpo", preferring(inputs, "dpo", run_dir, model=model, optimizer=rate))
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and lines[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-4)
    assert abs(expected[-1] - math.log(2)) > 0.01, "the adapters have no effect: nothing is tested"
    words = ["--prompt", "Q: 1+1=?\nA:", "--max-tokens", "4", "--greedy", "--device", "cpu"]
    assert main(["generate", str(run_dir), *words]) == 0
    assert main(["report", str(run_dir), "--out", str(tmp_path / "page")]) == 0
    assert "Implicit rewards" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_bfloat16_begins_at_the_reference_and_learns(inputs: Path, tmp_path: Path, kind: str) -> None:
    chosen = preferring(inputs, kind, tmp_path / "run", steps=9, epochs=9, optimizer={"lr": 2e-3})
    lines = run(kind, chosen | {"runtime": runtime(300, dtype="bfloat16")})
    begin = math.log(2) if kind == "dpo" else 0.5
    assert lines[0]["loss"] == pytest.approx(begin, rel=0.02) and lines[-1]["loss"] < 0.9 * begin
    assert lines[-1]["accuracy"] > 0.7
