"""Every supervised command in every layout trains as one rank does, with adapters as peft, and goes on after a stop."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from oppo_megatron.cli.main import main
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.data.prompts import RowOrder
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.errors import EXIT_REQUEUE, CheckpointError
from oppo_megatron.layout.role_memory import supervised_holdings
from oppo_megatron.policy.finding import find_policy
from oppo_megatron.preflight.validate import supervised_problems
from oppo_megatron.records import Source
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.trace import read_trace
from tests.e2e.supervised import (
    OPTIMIZER,
    SHAPE,
    Settings,
    hf_model,
    metrics,
    plain_steps,
    reference_loss,
    run,
    settings,
    token_rows,
)
from tests.support.hf import tensors_of
from tests.support.ranks import run_ranks

Capture = pytest.CaptureFixture[str]
LORA = {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
KINDS: dict[str, tuple[str, Settings]] = {
    "sft": ("sft", {}), "rm": ("rm", {}), "prm": ("prm", {}), "dpo": ("dpo", {}), "kto": ("kto", {}),
    "sft, adapters": ("sft", {"lora": LORA}), "rm, adapters": ("rm", {"lora": LORA}), "prm, adapters": ("prm", {"lora": LORA}),
    "dpo, adapters": ("dpo", {"lora": LORA}),
}  # fmt: skip
"""Commands and changes of the model, which has fresh heads and adapters that must be the same in every layout."""
LAYOUTS = {
    "TP2": (2, 1, 1, 1), "PP2": (1, 2, 1, 1), "DP2": (1, 1, 2, 1), "PP2 x DP2": (1, 2, 2, 1), "CP2": (1, 1, 1, 2),
}  # fmt: skip
MIXTURE = {"init": SHAPE | {"model_type": "mixtral", "num_local_experts": 8}}
MIXTURES: dict[str, tuple[str, Settings]] = {
    "sft, experts": ("sft", MIXTURE), "rm, experts": ("rm", MIXTURE), "dpo, experts": ("dpo", MIXTURE),
    "sft, experts, adapters": ("sft", MIXTURE | {"lora": LORA | {"targets": ["q_proj", "v_proj", "o_proj"]}}),
    "sft, GPT-OSS": (
        "sft", {"init": MIXTURE["init"] | {"model_type": "gpt_oss", "num_experts_per_tok": 2, "sliding_window": 12}}),
}  # fmt: skip
DIVIDED = {
    "TP2": (2, 1, 1, 1, 1), "DP2, EP2": (1, 1, 2, 1, 2), "DP4, EP2": (1, 1, 4, 1, 2), "PP2 x DP2, EP2": (1, 2, 2, 1, 2),
    "TP2 x DP2, EP2": (2, 1, 2, 1, 2),
}  # fmt: skip
SOON = {
    ("sft", "PP2 x DP2"), ("rm", "PP2"), ("dpo", "CP2"), ("kto", "DP2"), ("sft, adapters", "TP2"), ("sft, experts", "DP2, EP2"),
}  # fmt: skip
PAIRS = [*product(KINDS, LAYOUTS), *product(MIXTURES, DIVIDED)]
LOSSES = {"loss", "margin", "heldout"}


def figures(run_dir: Path) -> list[dict[str, Any]]:
    told = ("step", "loss", "accuracy", "margin", "lr", "grad_norm", "tokens", "heldout")
    return [{name: line[name] for name in told if name in line} for line in metrics(run_dir)]


def require_equal(run_dir: Path, whole: Path) -> None:
    assert figures(run_dir) == figures(whole)
    ours, theirs = tensors_of(run_dir / "weights"), tensors_of(whole / "weights")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def require_close(run_dir: Path, whole: Path) -> None:
    for ours, theirs in zip(figures(run_dir), figures(whole), strict=True):
        assert all(ours[name] == theirs[name] for name in ("step", "tokens", "lr"))
        for name in LOSSES & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), (name, ours["step"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3), ours["step"]
    found, expected = tensors_of(run_dir / "weights"), tensors_of(whole / "weights")
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-3


def chosen(inputs: Path, kind: str, run_dir: Path, **changes: Any) -> Settings:
    command, model = (KINDS | MIXTURES)[kind]
    schedule = {"lr": 3e-3, "eps": 1e-4, "decay": "linear", "warmup_steps": 2}
    evaluation = {"fraction": 0.25, "every_steps": 1}
    usual = {"batch_size": 5, "epochs": 2, "steps": 6, "optimizer": schedule, "evaluation": evaluation}
    return settings(
        inputs,
        command,
        run_dir,
        model={**({} if kind in MIXTURES else {"checkpoint": inputs / "qwen2"}), **model},
        **usual | changes,
    )


@pytest.fixture(scope="module")
def alone(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("alone")

    @cache
    def trained(kind: str) -> Path:
        run((KINDS | MIXTURES)[kind][0], chosen(inputs, kind, root / kind))
        return root / kind

    return trained


@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*pair, marks=[] if pair in SOON else [pytest.mark.long]) for pair in PAIRS]
)
def test_a_layout_trains_as_one_rank_and_goes_on_after_a_stop(
    inputs: Path, tmp_path: Path, alone: Callable[[str], Path], kind: str, layout: str
) -> None:
    layouts: dict[str, tuple[int, ...]] = DIVIDED if kind in MIXTURES else LAYOUTS
    num_ranks = prod(layouts[layout][:4])

    def train(name: str, layout: str = layout, stop_after: int | None = None, **changes: Any) -> Path:
        parallel = dict(zip(("tp", "pp", "dp", "cp", "ep"), layouts[layout], strict=False))
        own = chosen(inputs, kind, tmp_path / name, parallel=parallel, **changes)
        job, command = "tests.e2e.supervised:train", (KINDS | MIXTURES)[kind][0]
        run_ranks(prod(layouts[layout][:4]), job, kind=command, settings=own, stop_after=stop_after)
        return tmp_path / name

    whole = train("whole")
    require_close(whole, alone(kind))
    assert {span.rank for span in read_trace(whole / "trace.json")} == set(range(num_ranks))
    assert not list(whole.glob("trace.rank*")), "traces of ranks are merged"
    parts = train("parts", stop_after=3)
    assert len(metrics(parts)) == 3 and not (parts / "summary.json").exists()
    assert [position.step for position in CheckpointStore(parts / "checkpoints").positions()] == [3]
    shutil.copytree(parts, tmp_path / "elsewhere")
    require_equal(train("parts", checkpoint={"resume": True}), whole)
    other = list(layouts)[list(layouts).index(layout) - 1]
    require_close(train("elsewhere", other, checkpoint={"resume": True}), whole)


BASE = {"sft": "qwen2", "rm": "classifier"}
STEPS = 3


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is the reference; pip install 'oppo-megatron[test]'")


@pytest.fixture(scope="module")
def starts(peft: Any, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("starts")
    for kind, task in ("sft", "CAUSAL_LM"), ("rm", "SEQ_CLS"):
        config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=LORA["targets"], task_type=task)
        model = peft.get_peft_model(hf_model(kind, inputs / BASE[kind]), config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(0.1 * torch.randn(param.shape, generator=generator))
        model.save_pretrained(root / kind)
    return {kind: root / kind for kind in BASE}


def adapted(inputs: Path, kind: str, run_dir: Path, lora: dict[str, Any], **changes: Any) -> Settings:
    model = {"checkpoint": inputs / BASE[kind], "lora": LORA | lora}
    return settings(inputs, kind, run_dir, **{"epochs": STEPS, "model": model, **changes})


@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_steps_equal_peft_and_adamw(peft: Any, inputs: Path, starts: dict[str, Path], tmp_path: Path, kind: str) -> None:
    base = hf_model(kind, inputs / BASE[kind])
    model = peft.PeftModel.from_pretrained(base, starts[kind], is_trainable=True).get_base_model()
    rows = token_rows(inputs, kind)
    expected = plain_steps(model, [lambda own: reference_loss(own, kind, rows)] * STEPS, OPTIMIZER)
    lines = run(kind, adapted(inputs, kind, tmp_path / "run", {"adapter": starts[kind]}))
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx([norm for _, norm in expected], rel=1e-3)
    written = tmp_path / "run" / "weights"
    theirs = peft.PeftModel.from_pretrained(hf_model(kind, inputs / BASE[kind]), written).get_base_model()
    with torch.no_grad():  # peft reads what is written
        again = float(reference_loss(theirs, kind, rows))
        assert again == pytest.approx(float(reference_loss(model, kind, rows)), rel=1e-4)
    start, end = (load_file(folder / "adapter_model.safetensors") for folder in (starts[kind], written))
    assert start.keys() == end.keys() and all(not torch.equal(start[name], end[name]) for name in start)


def test_what_is_written_is_used_by_the_other_commands(peft: Any, inputs: Path, tmp_path: Path, capsys: Capture) -> None:
    keep = {"keep_best": True}
    chosen = adapted(inputs, "sft", tmp_path / "sft", {}, checkpoint=keep, evaluation={"fraction": 0.5, "every_steps": 1})
    run("sft", chosen)
    run("rm", adapted(inputs, "rm", tmp_path / "rm", {}))
    position = CheckpointStore(tmp_path / "sft" / "checkpoints").positions()[-1]
    answers = []
    for policy in ("", "weights", "best", f"checkpoints/{position.name}"):
        capsys.readouterr()
        where = str(tmp_path / "sft" / policy)
        assert main(["generate", where, "--prompt", "Q: 1+1=?\nA:", "--max-tokens", "6", "--greedy", "--device", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[3] and answers[0]
    for kind, target in ("sft", "causal-lm"), ("rm", "reward"):
        merged = tmp_path / f"merged-{kind}"
        words = ["convert", str(inputs / BASE[kind]), str(merged), "--adapter", str(tmp_path / kind / "weights")]
        assert main([*words, "--as", target]) == 0, capsys.readouterr().err
        theirs = peft.PeftModel.from_pretrained(hf_model(kind, inputs / BASE[kind]), tmp_path / kind / "weights")
        rows = token_rows(inputs, kind)
        with torch.no_grad():
            loss = float(reference_loss(hf_model(kind, merged), kind, rows))
            assert loss == pytest.approx(float(reference_loss(theirs.get_base_model(), kind, rows)), rel=1e-4)


def test_adapters_are_counted_and_checked_before_a_model_is_built(inputs: Path, starts: dict[str, Path], tmp_path: Path) -> None:
    plain = SFTConfig(**settings(inputs, "sft", tmp_path / "a"))
    small = SFTConfig(**adapted(inputs, "sft", tmp_path / "b", {}))
    (whole,), (adapters,) = supervised_holdings(plain, on_cpu=True), supervised_holdings(small, on_cpu=True)
    assert adapters.memory.optimizer < 0.5 * whole.memory.optimizer
    wrong = RewardModelConfig(**adapted(inputs, "rm", tmp_path / "c", {"adapter": starts["rm"], "rank": 8}))
    (problem,) = supervised_problems(wrong)
    assert problem.startswith("model.lora.adapter") and "rank" in problem
    assert json.loads((starts["rm"] / "adapter_config.json").read_text())["r"] == 4


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


@pytest.mark.parametrize(("kind", "replicas"), [("sft", 2), pytest.param("kto", 1, marks=pytest.mark.long)])
def test_weighted_files_come_in_their_order_on_all_ranks_and_after_a_stop_and_are_shown_as_they_train(
    inputs: Path, tmp_path: Path, capsys: Capture, kind: str, replicas: int
) -> None:
    rows = (inputs / ("sft.jsonl" if kind == "sft" else "pairs.jsonl")).read_text().splitlines(keepends=True)
    for name, part in (("a", rows[:11]), ("b", rows[11:20])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    paths = [tmp_path / "a.jsonl", {"path": tmp_path / "b.jsonl", "weight": 1.5}]
    model, per_row = {"checkpoint": inputs / "qwen2"}, 1 if kind == "sft" else 2

    def train(name: str, stop_after: int | None = None, **changes: Any) -> Path:
        own = settings(
            inputs, kind, tmp_path / name, data={"path": paths}, model=model, parallel={"dp": replicas}, batch_size=8,
            runtime={"device": "cpu", "micro_batch_tokens": 240}, **changes,
        )  # fmt: skip
        run_ranks(replicas, "tests.e2e.supervised:train", kind=kind, settings=own, stop_after=stop_after)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(own, default=str))))
        return tmp_path / name

    whole = train("whole")
    lines = metrics(whole)
    num_rows = math.ceil(per_row * (11 + 1.5 * 9))
    assert len(lines) == math.ceil(num_rows / 8)
    sources = [Source("a", 1.0)] * 11 * per_row + [Source("b", 1.5)] * 9 * per_row
    order = RowOrder(sources, 1)
    assert len(order.epoch(0)) == num_rows
    if kind == "sft":
        lengths = [len(prompt) + len(answers[0]) - 1 for prompt, answers in token_rows(inputs, "sft")]
        steps = [order.epoch(0)[first : first + 8] for first in range(0, num_rows, 8)]
        assert [line["tokens"] for line in lines] == [sum(lengths[row] for row in step) for step in steps]
    train("parts", stop_after=2)
    capsys.readouterr()
    command = "sft" if kind == "sft" else "dpo"
    assert main(["data", "show", str(tmp_path / "config.yaml"), "--kind", command]) == 0
    out, tokens = capsys.readouterr().out, [line["tokens"] for line in lines]
    assert f"{len(lines)} optimizer steps of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} in all, no padding" in out
    room = sum(line["tokens"] / line["packing_efficiency"] for line in lines)
    assert f"packing_efficiency {sum(tokens) / room:.2f}" in out
    paths[1] = {"path": tmp_path / "b.jsonl", "weight": 2}
    with pytest.raises(CheckpointError, match=r"weight, is .*2\.0\]\], but the checkpoint's run has .*1\.5\]\]"):
        run(kind, settings(inputs, kind, tmp_path / "parts", data={"path": paths}, model=model, checkpoint={"resume": True}))
    paths[1] = {"path": tmp_path / "b.jsonl", "weight": 1.5}
    require_equal(train("parts", checkpoint={"resume": True}), whole)


def test_a_run_goes_on_the_next_day_with_its_own_date(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
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
