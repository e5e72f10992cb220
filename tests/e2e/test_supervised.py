"""`oppo sft`, `oppo rm` and `oppo prm`: parity with transformers and torch, layouts, what a run leaves, bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Tokenizer

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.data.arithmetic import DatasetSizes, Shape, write_dataset, write_steps
from oppo_megatron.data.supervised_rows import Pair
from oppo_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from oppo_megatron.errors import CapacityError, CheckpointError, ConfigError, DataError
from oppo_megatron.rundir.trace import read_trace
from oppo_megatron.train.supervised import run_supervised
from oppo_megatron.train.supervised_tasks import RewardModelling
from tests.support.hf import SIZES, save_tiny
from tests.support.ranks import run_ranks

VOCAB = 320
NUM_ROWS = 24
SHAPE = {"model_type": "qwen2", **SIZES, "vocab_size": VOCAB, "tie_word_embeddings": True}
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "eps": 1e-4}
COLUMNS = {"sft": ["completion"], "rm": ["chosen", "rejected"]}
FILES = {"sft": "sft.jsonl", "rm": "pairs.jsonl", "prm": "steps.jsonl"}
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arithmetic rows, a sentencepiece tokenizer trained on them, and a tiny Qwen2 with tied embeddings."""
    root = tmp_path_factory.mktemp("inputs")
    sizes = DatasetSizes(sft=NUM_ROWS, pairs=NUM_ROWS, prompts=1, heldout=1)
    paths = write_dataset(root, seed=7, sizes=sizes, shape=Shape(max_operations=4))
    write_steps(root / FILES["prm"], seed=7, count=NUM_ROWS, shape=Shape(max_operations=4))
    rows = [json.loads(line) for line in paths["sft"].read_text().splitlines()]
    train_sentencepiece([row["prompt"] + row["completion"] for row in rows], root / "tokenizer.model", 280)
    save_tiny(root / "qwen2", "qwen2", vocab_size=VOCAB, tie_word_embeddings=True)
    save_tiny(root / "classifier", "qwen2", "scalar", vocab_size=VOCAB)
    return root


def settings(inputs: Path, kind: str, run_dir: Path, **changes: Any) -> Settings:
    """One step over all rows, several micro-batches, unless changed."""
    return {
        "run_dir": run_dir,
        "batch_size": NUM_ROWS,
        "max_tokens": 120,
        "tokenizer": {"path": inputs / "tokenizer.model"},
        "data": {"path": inputs / FILES.get(kind, FILES["rm"]), "shuffle": False},
        "model": {"checkpoint": inputs / ("qwen2" if kind == "sft" else "classifier")},
        "optimizer": OPTIMIZER,
        "runtime": {"device": "cpu", "threads_per_rank": 1, "micro_batch_tokens": 300},
        "logging": {"console": "off"},
        **changes,
    }


def run(kind: str, chosen: Settings) -> list[dict[str, Any]]:
    """Train in this process; the lines of metrics.jsonl."""
    run_supervised(SUPERVISED[kind](**chosen))
    return metrics(chosen["run_dir"])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def token_rows(inputs: Path, kind: str) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, answers) of every row, each answer ended by EOS, as transformers would be given them."""
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    rows = [json.loads(line) for line in (inputs / FILES[kind]).read_text().splitlines()]
    if kind == "prm":
        return [
            (tokenizer.encode(row["prompt"]), [[*tokenizer.encode("\n".join(row["completions"])), tokenizer.eos_id]])
            for row in rows
        ]
    return [
        (tokenizer.encode(row["prompt"]), [[*tokenizer.encode(row[c]), tokenizer.eos_id] for c in COLUMNS[kind]])
        for row in rows
    ]


def step_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The scalar head at every token, not only at the last one."""
    return model.score(model.model(torch.tensor([tokens])).last_hidden_state)[0, :, 0]


def judged_steps(inputs: Path, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of all steps: a step ends with its newline, the last with EOS."""
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    (newline,) = tokenizer.encode("\n")
    logits = []
    labels = [json.loads(line)["labels"] for line in (inputs / FILES["prm"]).read_text().splitlines()]
    for prompt, (answer,) in token_rows(inputs, "prm"):
        ends = [len(prompt) + place for place, token in enumerate(answer) if token in (newline, tokenizer.eos_id)]
        logits.append(step_logits(model, [*prompt, *answer])[ends])
    return torch.cat(logits), torch.tensor([label for row in labels for label in row]).float()


def whole_loss(model: Any, kind: str, inputs: Path) -> torch.Tensor:
    """The loss of all rows of the file."""
    if kind == "prm":
        return binary_cross_entropy_with_logits(*judged_steps(inputs, model))
    return reference_loss(model, kind, token_rows(inputs, kind))


def reference_loss(model: Any, kind: str, rows: list[tuple[list[int], list[list[int]]]]) -> torch.Tensor:
    """The loss of all rows, one unpacked sequence at a time."""
    losses = []
    for prompt, answers in rows:
        outputs = [model(torch.tensor([[*prompt, *answer]])).logits for answer in answers]
        if kind == "sft":
            logits = outputs[0][0, len(prompt) - 1 : -1]
            losses.append(cross_entropy(logits, torch.tensor(answers[0]), reduction="none"))
        else:
            losses.append(-logsigmoid(outputs[0][0] - outputs[1][0]))
    return torch.cat(losses).mean()


def hf_model(kind: str, directory: Path) -> Any:
    loader = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
    model, report = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("kind", ["sft", "rm", "prm"])
def test_one_step_equals_transformers_and_adamw(inputs: Path, tmp_path: Path, kind: str) -> None:
    chosen = settings(inputs, kind, tmp_path / "run")
    model = hf_model(kind, chosen["model"]["checkpoint"])
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    assert matrices and others
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"],
    )  # fmt: skip
    loss = whole_loss(model, kind, inputs)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"]))
    optimizer.step()
    assert norm > OPTIMIZER["clip_grad"], "the reference must clip, or clipping is not tested"

    (line,) = run(kind, chosen)
    assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    model.save_pretrained(tmp_path / "reference")
    expected, start = tensors_of(tmp_path / "reference"), tensors_of(chosen["model"]["checkpoint"])
    trained = tensors_of(tmp_path / "run" / "weights")
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (trained[name] - tensor).abs().max() < 2e-5, name
        assert (tensor - start[name]).abs().max() > 1e-3, f"{name} did not move: nothing is tested"


@pytest.mark.parametrize("kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("rm", "prm"))])
def test_layouts_train_alike(inputs: Path, tmp_path: Path, kind: str) -> None:
    changes: Settings = {"epochs": 3, "batch_size": 10}
    if kind != "sft":  # a fresh head has to be the same one on every layout
        changes["model"] = {"checkpoint": inputs / "qwen2", "fresh_head": True}
    alone = run(kind, settings(inputs, kind, tmp_path / "alone", **changes))
    assert len(alone) == 8, "3 epochs of 24 rows are 7 batches of 10 and one of 2"
    weights = tensors_of(tmp_path / "alone" / "weights")
    for tp, pp, dp in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)]:
        run_dir = tmp_path / f"tp{tp}pp{pp}dp{dp}"
        chosen = settings(inputs, kind, run_dir, parallel={"tp": tp, "pp": pp, "dp": dp}, **changes)
        run_ranks(tp * pp * dp, "tests.e2e.supervised_jobs:train", kind=kind, settings=chosen)
        for ours, theirs in zip(metrics(run_dir), alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4), (tp, pp, dp, ours["step"])
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3), (tp, pp, dp, ours["step"])
            assert ours["tokens"] == theirs["tokens"] and ours["lr"] == theirs["lr"]
        for name, tensor in tensors_of(run_dir / "weights").items():
            assert (tensor - weights[name]).abs().max() < 1e-3, (tp, pp, dp, name)
        assert {span.rank for span in read_trace(run_dir / "trace.json")} == set(range(tp * pp * dp))
        assert not list(run_dir.glob("trace.rank*")), "per-rank traces are merged"


@pytest.mark.parametrize("kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("rm", "prm"))])
def test_training_learns_and_leaves_a_model_that_transformers_gives_the_same_loss(
    inputs: Path, tmp_path: Path, kind: str
) -> None:
    model = {"init": {**SHAPE, "initializer_range": 0.1}}
    chosen = settings(inputs, kind, tmp_path / "run", model=model, epochs=48, optimizer={"lr": 5e-3, "decay": "linear"})
    lines = run(kind, chosen)
    assert [line["step"] for line in lines] == list(range(1, 49))
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["lr"] < lines[0]["lr"] == 5e-3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["kind"] == kind and summary["steps"] == 48 and summary["rows"] == NUM_ROWS
    assert summary["loss_last"] < summary["loss_first"]
    if kind != "sft":
        assert summary["accuracy_last"] > 0.75 and all(0 <= line["accuracy"] <= 1 for line in lines)

    weights = tmp_path / "run" / "weights"
    again = settings(inputs, kind, tmp_path / "again", model={"checkpoint": weights})
    (line,) = run(kind, again)
    with torch.no_grad():
        assert line["loss"] == pytest.approx(float(whole_loss(hf_model(kind, weights), kind, inputs)), rel=1e-5)


def test_held_out_steps_are_measured_as_transformers_measures_them(inputs: Path, tmp_path: Path) -> None:
    evaluation = {"data": {"path": inputs / FILES["prm"]}}
    chosen = settings(inputs, "prm", tmp_path / "run", steps=1, evaluation=evaluation)
    run("prm", chosen)
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["heldout"]
    for step, weights in ("0", chosen["model"]["checkpoint"]), ("1", tmp_path / "run" / "weights"):
        with torch.no_grad():
            logits, labels = judged_steps(inputs, hf_model("prm", weights))
        mean = measured[step]["mean"]
        assert mean["loss"] == pytest.approx(float(binary_cross_entropy_with_logits(logits, labels)), rel=1e-5)
        assert mean["accuracy"] == pytest.approx(float(((logits > 0) == (labels > 0.5)).double().mean()))


def test_what_a_run_leaves(inputs: Path, tmp_path: Path) -> None:
    chosen = settings(inputs, "sft", tmp_path / "run", epochs=1.5, batch_size=8, steps=4)
    lines = run("sft", chosen)
    assert len(lines) == 4, "1.5 epochs of 24 rows are 5 batches of 8, and steps is 4"
    fields = {"step", "time_s", "step_s", "loss", "tokens", "tokens_per_s", "lr", "grad_norm"}
    assert all(fields <= line.keys() for line in lines)
    assert all(0 < line["packing_efficiency"] <= 1 > line["padding_saved"] >= 0 for line in lines)
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {
        "config.yaml",
        "hosts.json",
        "metrics.jsonl",
        "trace.json",
        "summary.json",
        "weights",
        "checkpoints",
    }
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert SFTConfig(**resolved) == SFTConfig(**chosen)
    assert (tmp_path / "run/weights/tokenizer.model").read_bytes() == (inputs / "tokenizer.model").read_bytes()
    rows = [row[0] + row[1][0] for row in token_rows(inputs, "sft")[:8]]
    assert lines[0]["tokens"] == sum(len(row) - 1 for row in rows)


def test_finished_run_is_refused_and_kept(inputs: Path, tmp_path: Path) -> None:
    chosen = settings(inputs, "sft", tmp_path / "run", steps=1)
    run("sft", chosen)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="finished run"):
        run("sft", chosen)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before


def test_hugging_face_tokenizer_lies_beside_the_weights(inputs: Path, tmp_path: Path) -> None:
    pieces = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    given = Qwen2Tokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], eos_token=pieces[-1])
    given.save_pretrained(tmp_path / "tokenizer")
    run_dir = tmp_path / "run"
    chosen = settings(inputs, "sft", run_dir, tokenizer={"path": tmp_path / "tokenizer"}, steps=1)
    run("sft", chosen)
    found = AutoTokenizer.from_pretrained(run_dir / "weights")
    text = "Q: 7+5=?\nA:12"
    assert found.encode(text) == given.encode(text) and found.eos_token_id == 256
    again = {**chosen, "run_dir": tmp_path / "again", "tokenizer": {"path": run_dir / "weights"}}
    assert run("sft", again)[0]["tokens"] == metrics(run_dir)[0]["tokens"], "the weights serve as tokenizer.path"


def test_refused_rows_are_set_aside(inputs: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    long_row = {"prompt": "Q: 1", "completion": "1 2 " * 100}
    data.write_text((inputs / "sft.jsonl").read_text() + "not JSON\n" + json.dumps(long_row) + "\n")
    chosen = settings(inputs, "sft", tmp_path / "run", steps=1, data={"path": data, "bad_rows": "quarantine"})
    run("sft", chosen | {"checkpoint": {"final": "nothing"}})
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert "summary.json" in left and not {"weights", "checkpoints"} & left
    entries = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(entry["line"] for entry in entries) == [NUM_ROWS + 1, NUM_ROWS + 2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["quarantined"] == 2 and summary["rows"] == NUM_ROWS


def test_bad_rows_are_reported_before_the_model_is_built(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "qwen2", tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "Q: 1"}\n')
    chosen = settings(inputs, "sft", tmp_path / "run", model={"checkpoint": tmp_path / "broken"})
    with pytest.raises(DataError, match="completion"):
        run("sft", {**chosen, "data": {"path": data}})
    with pytest.raises(CheckpointError, match="safetensors"):
        run("sft", chosen)


def _small_vocabulary(chosen: Settings) -> Settings:
    return {**chosen, "model": {"init": {**SHAPE, "vocab_size": 64}}}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: {**c, "parallel": {"tp": 2}}, "1 ranks were started"),
        (_small_vocabulary, "vocabulary has 64 entries"),
        (lambda c: {**c, "max_tokens": 999}, "contexts of up to 999"),
    ],
)
def test_misfits_are_refused(
    inputs: Path, tmp_path: Path, change: Callable[[Settings], Settings], message: str
) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        run("sft", change(settings(inputs, "sft", tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_pair_is_never_torn_apart() -> None:
    pairs = [Pair([1] * n, [2] * (n % 5 + 1), [3] * (n % 3 + 1)) for n in range(1, 30)]
    micros = RewardModelling().micro_batches(pairs, 40, torch.device("cpu"))
    assert sorted(i for micro in micros for i in micro.index) == list(range(len(pairs)))
    for micro in micros:
        sequences = [prompt + answer for i in micro.index for prompt, *answers in [pairs[i]] for answer in answers]
        assert micro.tokens_T.tolist() == [token for sequence in sequences for token in sequence]
        assert micro.lengths == [len(sequence) for sequence in sequences]
        assert micro.tokens_T[micro.rows_R].tolist() == [2, 3] * len(micro.index), "rows are the answers' last tokens"
        assert len(micro.tokens_T) <= 40 or len(micro.index) == 1
