"""`oppo sft` and `oppo rm`, of pairs and of steps: parity with transformers and torch, layouts, what a run leaves, bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoTokenizer, Qwen2Tokenizer

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.supervised import SFTConfig
from oppo_megatron.data.supervised_rows import Pair, Rows, split_rows
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import CapacityError, CheckpointError, ConfigError, DataError
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.train.memory_meter import FIXED_MEBIBYTES
from oppo_megatron.train.supervised_tasks import RewardModelling
from tests.e2e import supervised
from tests.e2e.supervised import Settings, hf_model, metrics, reference_loss, run, settings, token_rows, whole_loss
from tests.support.hf import tensors_of
from tests.support.ranks import POOL, run_ranks


@pytest.mark.parametrize("kind", ["sft", "rm", "prm"])
def test_one_step_equals_transformers_and_adamw(inputs: Path, tmp_path: Path, kind: str) -> None:
    chosen = settings(inputs, kind, tmp_path / "run")
    model = hf_model(kind, chosen["model"]["checkpoint"])
    ((loss, norm),) = supervised.plain_steps(model, [lambda own: whole_loss(own, kind, inputs)], supervised.OPTIMIZER)
    assert norm > supervised.OPTIMIZER["clip_grad"], "the reference must clip, or clipping is not tested"

    (line,) = run(kind, chosen)
    assert line["loss"] == pytest.approx(loss, rel=1e-5) and line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    supervised.require_moved(tmp_path / "run" / "weights", model, chosen["model"]["checkpoint"], 2e-5)


@pytest.mark.parametrize("kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("rm", "prm"))])
def test_training_learns_and_leaves_a_model_of_that_loss_in_transformers(inputs: Path, tmp_path: Path, kind: str) -> None:
    model = {"init": {**supervised.SHAPE, "initializer_range": 0.1}}
    chosen = settings(inputs, kind, tmp_path / "run", model=model, epochs=48, optimizer={"lr": 5e-3, "decay": "linear"})
    lines = run(kind, chosen)
    assert [line["step"] for line in lines] == list(range(1, 49)) and lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["lr"] < lines[0]["lr"] == 5e-3
    told = summary(tmp_path / "run")
    assert told["kind"] == kind and told["steps"] == 48 and told["rows"] == supervised.NUM_ROWS
    assert told["loss_last"] < told["loss_first"]
    if kind != "sft":
        assert told["accuracy_last"] > 0.75 and all(0 <= line["accuracy"] <= 1 for line in lines)

    weights = tmp_path / "run" / "weights"
    (line,) = run(kind, settings(inputs, kind, tmp_path / "again", model={"checkpoint": weights}))
    with torch.no_grad():
        assert line["loss"] == pytest.approx(float(whole_loss(hf_model(kind, weights), kind, inputs)), rel=1e-5)


def test_held_out_steps_are_measured_as_transformers_measures_them(inputs: Path, tmp_path: Path) -> None:
    evaluation = {"data": {"path": inputs / supervised.FILES["prm"]}}
    chosen = settings(inputs, "prm", tmp_path / "run", steps=1, evaluation=evaluation)
    run("prm", chosen)
    measured = summary(tmp_path / "run")["heldout"]
    for step, weights in ("0", chosen["model"]["checkpoint"]), ("1", tmp_path / "run" / "weights"):
        with torch.no_grad():
            logits, labels = supervised.judged_steps(inputs, hf_model("prm", weights))
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
    assert found == {"config.yaml", "hosts.json", "metrics.jsonl", "trace.json", "summary.json", "weights", "checkpoints"}
    assert SFTConfig(**yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == SFTConfig(**chosen)
    assert (tmp_path / "run/weights/tokenizer.model").read_bytes() == (inputs / "tokenizer.model").read_bytes()
    rows = [row[0] + row[1][0] for row in token_rows(inputs, "sft")[:8]]
    assert lines[0]["tokens"] == sum(len(row) - 1 for row in rows)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="finished run"):
        run("sft", chosen)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before, "it is kept"


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
    assert sorted(entry["line"] for entry in entries) == [supervised.NUM_ROWS + 1, supervised.NUM_ROWS + 2]
    told = summary(tmp_path / "run")
    assert told["quarantined"] == 2 and told["rows"] == supervised.NUM_ROWS


def test_bad_rows_are_reported_before_the_model_is_built(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "qwen2", tmp_path / "broken", ignore=shutil.ignore_patterns("*.safetensors"))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "Q: 1"}\n')
    chosen = settings(inputs, "sft", tmp_path / "run", model={"checkpoint": tmp_path / "broken"})
    with pytest.raises(DataError, match="completion"):
        run("sft", {**chosen, "data": {"path": data}})
    with pytest.raises(CheckpointError, match="safetensors"):
        run("sft", chosen)


@pytest.mark.parametrize(("change", "message"), [
    ({"parallel": {"tp": 2}}, "1 ranks were started"),
    ({"model": {"init": {**supervised.SHAPE, "vocab_size": 64}}}, "vocabulary has 64 entries"),
    ({"max_tokens": 999}, "contexts of up to 999"),
])  # fmt: skip
def test_misfits_are_refused(inputs: Path, tmp_path: Path, change: Settings, message: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        run("sft", settings(inputs, "sft", tmp_path / "run") | change)
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


HALF = {"fraction": 0.5, "every_steps": 1}


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def held(inputs: Path, kind: str, fraction: float = 0.5, seed: int = 1) -> list[tuple[list[int], list[list[int]]]]:
    rows = Rows((prompt, *answers) for prompt, answers in token_rows(inputs, kind))
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
    assert told["memory_peak_mb"][0] >= told["memory_base_mb"][0] > 0 and told["memory_planned_mb"][0] > 0
    assert lines[-1]["memory_peak_mb"] <= told["memory_peak_mb"]
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
    names = ["prompt", *supervised.COLUMNS[kind]]
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
    run_ranks(1, "tests.e2e.supervised:train", kind="sft", settings=parts, stop_after=2)
    run("sft", {**parts, "checkpoint": {"resume": True}})
    again = summary(tmp_path / "parts")
    for key in ("heldout", "best", "stopped_early", "steps"):
        assert again[key] == told[key]
    run("sft", {**parts, "early_stop": None, "checkpoint": {"resume": True}})
    assert summary(tmp_path / "parts")["stopped_early"] is None and len(metrics(tmp_path / "parts")) == 24


@pytest.fixture
def fresh_ranks() -> None:
    """Processes that are used again remember the most that they held."""
    POOL.close()


@pytest.mark.long
@pytest.mark.usefixtures("fresh_ranks")
def test_ranks_that_share_a_long_sequence_take_what_is_planned(inputs: Path, tmp_path: Path) -> None:
    """MiB of the fullest rank for 32,768 tokens, by the number of ranks."""
    longest, text, taken = 2**15, "1+2=3, ", list[float]()
    tokenizer = load_tokenizer(TokenizerConfig(path=inputs / "tokenizer.model"))
    count = (longest - 64) * 1000 // len(tokenizer.encode(text * 1000))
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "Q", "completion": text * count}) + "\n")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 512}
    model = {"init": {**supervised.SHAPE, **sizes, "num_hidden_layers": 2, "max_position_embeddings": longest}}
    common: Settings = {
        "data": {"path": tmp_path / "long.jsonl"}, "model": model, "batch_size": 1, "max_tokens": longest,
        "runtime": {"device": "cpu", "micro_batch_tokens": longest},
    }  # fmt: skip
    for cp in (4, 2, 1):  # rising: the same processes
        chosen = settings(inputs, "sft", tmp_path / str(cp), parallel={"cp": cp}, **common)
        run_ranks(cp, "tests.e2e.supervised:train_with_few_holes", kind="sft", settings=chosen)
        told = summary(tmp_path / str(cp))
        assert metrics(tmp_path / str(cp))[0]["tokens"] > 0.98 * longest
        own = [peak - base for peak, base in zip(told["memory_peak_mb"], told["memory_base_mb"], strict=True)]
        planned = zip(own, told["memory_planned_mb"], strict=True)
        assert all(0.7 * plan < size < 1.1 * plan + FIXED_MEBIBYTES for size, plan in planned), (own, told["memory_planned_mb"])
        taken.append(max(own))
    assert taken[0] < 0.75 * taken[1] < 0.75 * 0.75 * taken[2]


@pytest.mark.long
@pytest.mark.usefixtures("fresh_ranks")
def test_replicas_that_divide_experts_take_what_is_planned(inputs: Path, tmp_path: Path) -> None:
    """MiB of the fullest of two ranks."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024, "num_hidden_layers": 2}
    model = {"init": {**supervised.SHAPE, **sizes, "model_type": "mixtral", "num_local_experts": 16}}
    taken = []
    for ep in (2, 1):  # rising: the same processes
        chosen = settings(inputs, "sft", tmp_path / str(ep), parallel={"dp": 2, "ep": ep}, model=model, batch_size=8)
        run_ranks(2, "tests.e2e.supervised:train_with_few_holes", kind="sft", settings=chosen)
        told = summary(tmp_path / str(ep))
        own = [peak - base for peak, base in zip(told["memory_peak_mb"], told["memory_base_mb"], strict=True)]
        planned = zip(own, told["memory_planned_mb"], strict=True)
        assert all(0.9 * plan < size < 1.1 * plan + FIXED_MEBIBYTES for size, plan in planned), (own, told["memory_planned_mb"])
        taken.append((max(own), max(told["memory_planned_mb"])))
    experts = 2 * 16 * 3 * 1024 * 512 * 4 / 2**20
    assert taken[1][1] - taken[0][1] >= experts, "half of the weights and of the gradients"
    assert taken[1][0] - taken[0][0] > 0.9 * experts
    print(taken)
