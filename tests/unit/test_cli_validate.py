"""`oppo validate` reads the rows as the run would, before any model is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.data.tokenizer import train_sentencepiece

SHAPE = {
    "model_type": "qwen2", "vocab_size": 304, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
ROWS = (
    rb'{"prompt": "1+1=", "answer": "2", "completion": "it is 2"}',
    rb'{"prompt": "1+1=", "answer": "2", "completion": "it is 2"}',
    rb'{"prompt": "caf\ud83d", "answer": "2", "completion": "x"}',
    b'{"prompt": "\xe9", "answer": "2", "completion": "x"}',
    rb'{"prompt": "2+2=", "answer": "no number", "completion": "it is 4"}',
    rb'{"prompt": "1+2+3+4+5+6+7+8+9+1+2+3+4+5+6=", "answer": "9", "completion": "it is 4"}',
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    texts = [f"what is {n} plus {n}? it is {2 * n} = + - * 0123456789" for n in range(60)]
    train_sentencepiece(texts, tmp_path / "t.model", 300)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(ROWS))
    shape = json.dumps(SHAPE)
    (tmp_path / "train.yaml").write_text(
        "run_dir: run\ntokenizer: {path: t.model}\nplacement: {mode: single}\n"
        f"data: {{path: rows.jsonl, max_prompt_tokens: 20}}\nactor: {{init: {shape}}}\ncritic: {{init: {shape}}}\n"
        "rewards: [{kind: verifier, name: arithmetic}]\nrollout: {batch_size: 8, max_response_tokens: 20}\n"
    )
    (tmp_path / "sft.yaml").write_text(
        f"run_dir: run\ntokenizer: {{path: t.model}}\ndata: {{path: rows.jsonl}}\nmodel: {{init: {shape}}}\nmax_tokens: 64\n"
    )
    return tmp_path


def test_every_bad_row_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "train.yaml"]) == 2
    err = capsys.readouterr().err
    assert "4 rows cannot be used" in err and "Traceback" not in err
    assert [n for n in range(1, 7) if f"rows.jsonl:{n}:" in err] == [3, 4, 5, 6]
    assert "data.bad_rows=quarantine and data.long_rows=quarantine" in err
    assert main(["validate", "train.yaml", "--skip-data"]) == 0


def test_rows_set_aside_and_duplicates_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = ["data.bad_rows=quarantine", "data.long_rows=truncate"]
    assert main(["validate", "train.yaml", *policy]) == 0
    out = capsys.readouterr().out
    assert "data: 3 prompts, 1 of them duplicates, 1 cut at max_prompt_tokens; 3 rows set aside\n" in out
    assert "  rows.jsonl:3: column 'prompt' is not text: half of a surrogate pair at character 3\n" in out
    assert not (folder / "run").exists()


def test_rows_of_supervised_training_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "sft.yaml"]) == 2
    assert "rows.jsonl:4: not UTF-8" in capsys.readouterr().err
    assert main(["validate", "sft.yaml", "data.bad_rows=quarantine"]) == 0
    assert "data: 4 rows, 1 of them duplicates; 2 rows set aside\n" in capsys.readouterr().out
    held_out = "evaluation={data: {path: rows.jsonl, bad_rows: quarantine}}"
    assert main(["validate", "sft.yaml", "data.bad_rows=quarantine", held_out]) == 0
    said = "4 rows, 1 of them duplicates; 2 rows set aside; 4 rows held out, 4 of them measured; 2 more of the held-out files"
    assert f"data: {said} set aside\n" in capsys.readouterr().out


def test_services_too(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SERVE_TOKEN", raising=False)
    shape = json.dumps(SHAPE)
    (folder / "serve.yaml").write_text(
        "rewards: [{kind: model}, {kind: verifier, name: gsm8k, weight: 0.5}]\n"
        f"reward: {{init: {shape}}}\ntokenizer: {{path: t.model}}\nmax_tokens: 64\n"
    )
    (folder / "scorer.yaml").write_text(f"reward: {{init: {shape}}}\n")

    def refused(*arguments: str) -> str:
        assert main(["validate", *arguments]) == 2
        return capsys.readouterr().err

    assert main(["validate", "serve.yaml"]) == 0
    out = capsys.readouterr().out
    assert "listens on 127.0.0.1, port 8900, without a token\nrewards: model x 1, gsm8k x 0.5\n" in out
    assert "valid configuration for `oppo serve`" in out
    assert main(["validate", "scorer.yaml"]) == 0
    assert "valid configuration for `oppo serve`" in capsys.readouterr().out
    assert "others can reach" in refused("scorer.yaml", "host=0.0.0.0")
    assert "SERVE_TOKEN is not set" in refused("serve.yaml", "host=0.0.0.0", "token_env=SERVE_TOKEN")
    assert "cannot be imported" in refused("serve.yaml", "rewards=[{kind: model}, {kind: python, entry_point: 'no_module:f'}]")
    monkeypatch.setenv("SERVE_TOKEN", "a-token-of-enough-characters")
    monkeypatch.syspath_prepend(folder)
    (folder / "spy.py").write_text("import os\nassert 'SERVE_TOKEN' not in os.environ, 'seen'\ndef f(*_): return 0.0\n")
    spy = "rewards=[{kind: model}, {kind: python, entry_point: 'spy:f', isolate: true}]"
    assert main(["validate", "serve.yaml", spy, "token_env=SERVE_TOKEN"]) == 0
    assert "spy:f" in capsys.readouterr().out
    assert "seen" in refused("serve.yaml", spy), "a token that is not named is no secret"
    assert "the tokenizer gives ids up to 299" in refused("serve.yaml", "reward.init.vocab_size=9")
    assert "`nowhere` does not exist" in refused("serve.yaml", "reward={checkpoint: nowhere, init: null}")
