"""Settings of `oppo dpo`: defaults, what is refused and by which words, the rows and memory of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from oppo_megatron.cli.load import guess_kind
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.layout.role_memory import supervised_holdings
from oppo_megatron.preflight.validate import supervised_problems
from tests.support.hf import save_tiny
from tests.support.tokenizers import save_byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    save_tiny(root / "model", "qwen2", vocab_size=320)
    save_tiny(root / "other", "qwen2", vocab_size=321)
    save_tiny(root / "critic", "qwen2", "scalar", vocab_size=320)
    save_byte_level(root, ["1+1=2"])
    (root / "rows.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}) + "\n")
    return root


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run_dir": folder / "run",
        "tokenizer": {"path": folder},
        "data": {"path": folder / "rows.jsonl"},
        "model": {"checkpoint": folder / "model"},
        "max_tokens": 64,
        "runtime": {"device": "cpu", "micro_batch_tokens": 128},
        **changes,
    }


def config(loss: str, folder: Path, **changes: Any) -> DPOConfig:
    rule = {"loss": loss, **changes.pop("dpo", {})}
    return DPOConfig.model_validate(settings(folder, dpo=rule, **changes))


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_defaults(loss: str, folder: Path) -> None:
    chosen = config(loss, folder)
    assert supervised_problems(chosen) == []
    assert chosen.optimizer.lr == 1e-6 and chosen.dpo.beta == 0.1
    adapted = config(loss, folder, model={"checkpoint": folder / "model", "lora": {"rank": 2}})
    assert adapted.optimizer.lr == 1e-5
    half = config(loss, folder, reference={"checkpoint": folder / "model"}, runtime={"dtype": "bfloat16", "device": "cpu"})
    assert half.reference is not None and half.reference.dtype == "bfloat16" == half.model.dtype


@pytest.mark.parametrize(
    ("loss", "change", "words"),
    [
        ("sigmoid", {"runtime": {"device": "cpu", "micro_batch_tokens": 127}}, "is 127, but a pair may have 128 tokens (twice"),
        ("robust", {}, "dpo.loss is robust, but dpo.label_smoothing is 0, so that it is sigmoid"),
        ("ipo", {"dpo": {"label_smoothing": 0.1}}, "is 0.1, but dpo.loss ipo has none; remove it"),
        ("hinge", {"dpo": {"label_smoothing": 0.1}}, "dpo.loss hinge has none"),
        ("hinge", {"dpo": {"unwanted": 2}}, "dpo.unwanted is 2.0, but dpo.loss hinge is of pairs and does not read it"),
        ("kto", {"dpo": {"average": True}}, "dpo.average is true, but dpo.loss kto is of single completions and does not"),
        ("kto", {"batch_size": 1}, "batch_size is 1, but dpo.loss kto compares rows of a batch"),
        ("ipo", {"reference": {"checkpoint": "FOLDER/other"}}, "its vocabulary has 321 entries, but must equal the model's 320"),
        ("ipo", {"reference": {"checkpoint": "FOLDER/none"}}, "reference.checkpoint `FOLDER/none` does not exist"),
        ("ipo", {"reference": {"checkpoint": "FOLDER/critic"}}, "reference: its checkpoint is a Qwen2ForSequenceClassification"),
        ("kto", {"reference_logprobs": "FOLDER"}, "reference_logprobs is FOLDER, which is a folder; name a file in it"),
        ("ipo", {"evaluation": {"fraction": 0.5}, "early_stop": {"metric": "los"}}, "early_stop.metric is 'los'"),
    ],
)
def test_what_is_refused(loss: str, change: dict[str, Any], words: str, folder: Path) -> None:
    placed = json.loads(json.dumps(change).replace("FOLDER", str(folder)))
    problems = supervised_problems(config(loss, folder, **placed))
    assert len(problems) == 1 and words.replace("FOLDER", str(folder)) in problems[0]


def test_kto_of_one_row_needs_no_others(folder: Path) -> None:
    assert supervised_problems(config("apo_zero_unpaired", folder, batch_size=1)) == []


@pytest.mark.parametrize(
    "rule", [{"beta": 0}, {"beta": -0.1}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"nll": -1}, {"wanted": 0}]
)
def test_numbers_out_of_range(rule: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValidationError, match=rf"dpo\.{next(iter(rule))}"):
        config("sigmoid", folder, dpo=rule)


def test_a_pair_counts_twice_in_the_plan_of_memory(folder: Path) -> None:
    few = {"batch_size": 1, "runtime": {"device": "cpu", "micro_batch_tokens": 4096}}
    (pair,), (row,) = (supervised_holdings(config(loss, folder, **few), on_cpu=False) for loss in ("sigmoid", "kto"))
    (sft,) = supervised_holdings(SUPERVISED["sft"].model_validate(settings(folder, **few)), on_cpu=False)
    assert row.memory == sft.memory
    assert pair.memory.activations == pytest.approx(2 * row.memory.activations, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("dpo", {"dpo": {"beta": 0.2}}),
        ("rm", {"separator": "x"}),
        ("rm", {"data": {"path": "d", "columns": {"labels": "l"}}}),
        ("rm", {}),  # its first row has a chosen answer
        ("sft", {"data": {"path": "d"}}),
    ],
)
def test_the_command_of_a_file_is_known_by_its_keys(kind: str, change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    tree = json.loads(json.dumps(settings(folder, **change), default=str))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    assert guess_kind(tmp_path / "x.yaml") == kind


def test_steps_need_a_separator(folder: Path) -> None:
    rm = SUPERVISED["rm"].model_validate(settings(folder, data={"path": folder / "rows.jsonl", "columns": {"labels": "l"}}))
    assert any("separator is null; set it" in problem for problem in supervised_problems(rm))
