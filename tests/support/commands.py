"""A working directory in which a command is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.data.tokenizer import train_sentencepiece

SHAPE = {
    "model_type": "qwen2", "vocab_size": 304, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
TEXTS = [f"what is {n} plus {n}? it is {2 * n} = + - * 0123456789" for n in range(60)]

LEAST = """
run_dir: run
steps: 3
tokenizer: {path: tok}
data: {path: rows.jsonl, max_prompt_tokens: 20}
actor: {init: {model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
               num_attention_heads: 4}}
critic: {init: "${actor.init}"}
rewards: [{kind: verifier, name: gsm8k}]
rollout: {batch_size: 8, max_response_tokens: 20}
"""
"""A configuration of `oppo train` whose files `enter` makes."""


def work_in(folder: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: bool = False) -> None:
    """Leave what launchers set behind; with a `vocabulary`, make t.model of `TEXTS`."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "COLUMNS", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    if vocabulary:
        train_sentencepiece(TEXTS, folder / "t.model", 300)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> Path:
    work_in(folder, monkeypatch)
    (folder / "tok").mkdir()
    (folder / "rows.jsonl").write_text('{"question": "1+1", "prompt": "1+1", "answer": "2"}\n')
    path = folder / "c.yaml"
    path.write_text(config)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The output of a command line that ends well."""
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a command line that ends with 2; only `validate` and `plan simulate` may have shown something before."""
    words = [*map(str, arguments)]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and (captured.out == "" or {"validate", "simulate"} & {*words[:2]})
    return captured.err
