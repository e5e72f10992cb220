"""examples/gsm8k: the short chain on the real files, a checkpoint of one's own by two changed lines, and bad calls."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Tokenizer

from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.rundir.trace import read_trace
from tests.support.hf import save_tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gsm8k"
FILES = ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "gsm8k_preference_pairs.jsonl")
METRICS_PAGE = (EXAMPLE.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
STAGES = {"sft": SFTConfig, "rm": RewardModelConfig, "ppo": TrainConfig}
STEPS = {"sft": 16, "rm": 24, "ppo": 30}


def call(*arguments: str | Path, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user's shell would: the interpreter's folder is on PATH, threads are the program's choice."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run([str(a) for a in arguments], env=environment, capture_output=True, text=True, timeout=timeout_s)


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def summary(out: Path, stage: str) -> dict[str, Any]:
    return json.loads((out / stage / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def short(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gsm8k") / "out of run"
    done = call(EXAMPLE / "run.sh", "--short", shared_data, out, timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.long
def test_the_short_chain_leaves_whole_runs_and_learns(short: Path, shared_data: Path) -> None:
    """Weights load in transformers, both overlaps are at work, the reward rises, and nothing of the test set is in it."""
    for stage, kind in STAGES.items():
        run = short / stage
        load_config(kind, run / "config.yaml")
        assert "gsm8k_test" not in (run / "config.yaml").read_text(encoding="utf-8"), kind
        lines = rows(run / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, STEPS[stage] + 1))
        assert summary(short, stage)["steps"] == STEPS[stage]
        assert not any("incomplete" in line or "non_finite" in line for line in lines)
        spans = read_trace(run / "trace.json")
        assert {span.rank for span in spans} == ({0, 1} if stage == "ppo" else {0})
        assert {"update"} <= {span.name for span in spans}
        named = {*lines[0], *lines[-1], *summary(short, stage), *(span.name for span in spans)}
        absent = [name for name in named if f"`{name}`" not in METRICS_PAGE and not name.endswith(("_first", "_last"))]
        assert not absent, f"describe in docs/metrics.md: {absent}"
    places = {
        "sft/weights": AutoModelForCausalLM, "rm/weights": AutoModelForSequenceClassification,
        "ppo/weights/actor": AutoModelForCausalLM, "ppo/weights/critic": AutoModelForSequenceClassification,
    }  # fmt: skip
    for place, loader in places.items():
        model, report = loader.from_pretrained(short / place, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"], place
        assert 5e6 <= sum(p.numel() for p in model.parameters()) <= 20e6
        assert (short / place / "tokenizer.model").read_bytes() == (short / "tokenizer.model").read_bytes()
    config = load_config(TrainConfig, short / "ppo" / "config.yaml")
    assert config.overlap.intra and config.overlap.inter and world_size(config) == 2
    found, lines = summary(short, "ppo"), rows(short / "ppo" / "metrics.jsonl")
    assert sum(count for times, count in found["deferred"].items() if int(times) > 0) > 0
    assert 0 < found["scoring_hidden"] <= 1
    model_reward = [line["reward_parts"]["model"] for line in lines]
    assert sum(model_reward[-6:]) / 6 > sum(model_reward[:3]) / 3
    assert summary(short, "sft")["loss_last"] < summary(short, "sft")["loss_first"] - 0.5
    test = {row["question"] for row in rows(shared_data / FILES[1])}
    train, heldout = rows(short / "data" / "train.jsonl"), rows(short / "data" / "heldout.jsonl")
    assert train + heldout == rows(shared_data / FILES[0]) and not test & {row["question"] for row in train + heldout}
    assert config.evaluation.data.path == short / "data/heldout.jsonl"


@pytest.mark.long
def test_finished_stages_are_reused_and_another_variant_is_refused(short: Path, shared_data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in short.rglob("*.jsonl")}
    again = call(EXAMPLE / "run.sh", "--short", shared_data, short)
    assert again.returncode == 0 and again.stdout.count("reused") == 3, again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in short.rglob("*.jsonl")} == before
    full = call(EXAMPLE / "run.sh", shared_data, short)
    assert full.returncode == 2 and "holds a short run" in full.stderr


def change_two_lines(config: Path, checkpoint: Path) -> None:
    before = config.read_text(encoding="utf-8")
    after = re.sub(r"(?m)^  path: .*# \(1\)$", f"  path: {checkpoint}", before)
    after = re.sub(r"(?m)^  init: .*# \(2\)$", f"  checkpoint: {checkpoint}", after)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+")]
    assert len(changed) == 2, changed
    config.write_text(after, encoding="utf-8")


@pytest.mark.long
def test_two_changed_lines_make_the_chain_start_from_a_checkpoint(shared_data: Path, tmp_path: Path) -> None:
    checkpoint, example, out = tmp_path / "Qwen2.5-tiny", tmp_path / "gsm8k", tmp_path / "out"
    pieces = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    Qwen2Tokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=[], eos_token=pieces[-1]).save_pretrained(checkpoint)
    given = save_tiny(checkpoint, "qwen2", vocab_size=320, max_position_embeddings=1024, tie_word_embeddings=True)
    shutil.copytree(EXAMPLE, example)
    change_two_lines(example / "sft.yaml", checkpoint)
    for name in FILES:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows(shared_data / name)[:40]))
    prepared = call("python3", example / "prepare.py", tmp_path, out / "data", "10")
    assert prepared.returncode == 0, prepared.stderr
    few = {
        "sft": ["steps=2", "batch_size=4"],
        "rm": ["steps=2", "batch_size=2", "max_tokens=1000"],
        "ppo": [
            "steps=2", "rollout.batch_size=4", "rollout.max_response_tokens=12", "overlap.delta.max=4",
            "data.max_prompt_tokens=400", "evaluation.data.max_prompt_tokens=400", "evaluation.data.max_rows=2",
        ],
    }  # fmt: skip
    groups = ["rollout.group_size=2", "overlap.delta.max=2", "filter=null"]  # all rewards are 0: a filter would drop all
    few |= {stage: few["ppo"] + groups for stage in ("grpo", "dapo")}
    for stage, overrides in few.items():
        command = stage if stage in ("sft", "rm") else "train"
        done = call("oppo", command, example / f"{stage}.yaml", *overrides, timeout_s=300, GSM8K_OUT=str(out))
        assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("grpo", "dapo"):
        lines = rows(out / stage / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2] and "gsm8k" in lines[-1]["reward_parts"]
        assert "critic_loss" not in lines[-1] and (lines[-1]["kl_mean"] is None) == (stage == "dapo")
    trained = AutoModelForCausalLM.from_pretrained(out / "ppo/weights/actor", dtype=torch.float32)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out / "ppo/weights/actor", checkpoint))
    end = theirs.eos_token_id  # which the given config.json does not name
    assert trained.config.to_dict() | {"dtype": None} == given.config.to_dict() | {
        "dtype": None, "_name_or_path": trained.config._name_or_path, "eos_token_id": end, "pad_token_id": end
    }  # fmt: skip
    assert ours.encode("a\n1") == theirs.encode("a\n1") and ours.eos_token_id == end


@pytest.mark.parametrize("missing", FILES)
def test_missing_file_is_named_with_the_place_looked_at(missing: str, tmp_path: Path) -> None:
    for name in set(FILES) - {missing}:
        (tmp_path / name).write_text("{}\n")
    done = call(EXAMPLE / "run.sh", tmp_path, tmp_path / "out")
    assert done.returncode == 2 and f"{missing} is missing (looked for {tmp_path}/{missing})" in done.stderr
    assert not (tmp_path / "out").exists(), "nothing is written before the input is known to be there"


@pytest.mark.parametrize(("arguments", "complaint"), [
    ([], "DATA_DIR is needed"),
    (["a", "b", "c"], "3 arguments were given"),
    (["no/such/folder"], "'no/such/folder' is not a folder"),
    (["--shrot", "data"], "--shrot is not an option"),
])  # fmt: skip
def test_bad_calls_end_with_one_clear_line(arguments: list[str], complaint: str) -> None:
    done = call(EXAMPLE / "run.sh", *arguments)
    assert done.returncode == 2 and complaint in done.stderr.splitlines()[-1]


def test_help() -> None:
    done = call(EXAMPLE / "run.sh", "--help")
    assert done.returncode == 0 and "DATA_DIR" in done.stdout and not done.stderr


@pytest.mark.parametrize(("line", "complaint"), [
    (b"not JSON", "gsm8k_train.jsonl:2: not JSON"),
    (b'{"question": "q\xff", "answer": "a"}', "gsm8k_train.jsonl:2: not JSON"),
    (b'{"question": "q"}', "gsm8k_train.jsonl:2: no text in answer"),
    (b"[]", "gsm8k_train.jsonl:2: no text in question, answer"),
])  # fmt: skip
def test_bad_row_is_named_by_file_and_line(line: bytes, complaint: str, tmp_path: Path) -> None:
    good = json.dumps({"question": "q", "answer": "#### 1", "chosen": "a", "rejected": "b"}).encode() + b"\n"
    for name in FILES:
        (tmp_path / name).write_bytes(good + (line + b"\n" if name == FILES[0] else b""))
    done = call(EXAMPLE / "run.sh", "--short", tmp_path, tmp_path / "out")
    assert done.returncode != 0 and complaint in done.stderr and not (tmp_path / "out/data/train.jsonl").exists()
