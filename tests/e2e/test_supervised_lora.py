"""`oppo sft` and `oppo rm` with adapters: as peft and AdamW train them, on every layout, interrupted or not; others use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oppo_megatron.cli.main import main
from oppo_megatron.config.supervised import RewardModelConfig, SFTConfig
from oppo_megatron.layout.role_memory import supervised_holdings
from oppo_megatron.preflight.validate import supervised_problems
from oppo_megatron.rundir.checkpoints import CheckpointStore
from tests.e2e.supervised import OPTIMIZER, Settings, hf_model, reference_loss, run, settings, token_rows

peft = pytest.importorskip("peft", reason="peft is the reference; pip install 'oppo-megatron[test]'")

LORA = {"rank": 4, "alpha": 12.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
BASE = {"sft": "qwen2", "rm": "classifier"}
STEPS = 3


@pytest.fixture(scope="module")
def starts(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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
def test_steps_equal_peft_and_adamw(inputs: Path, starts: dict[str, Path], tmp_path: Path, kind: str) -> None:
    base = hf_model(kind, inputs / BASE[kind])
    model = peft.PeftModel.from_pretrained(base, starts[kind], is_trainable=True).get_base_model()
    learned = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"]
    )
    rows, expected = token_rows(inputs, kind), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = reference_loss(model, kind, rows)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(learned, OPTIMIZER["clip_grad"]))
        optimizer.step()
        expected.append((loss.item(), norm))

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


def test_what_is_written_is_used_by_the_other_commands(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
