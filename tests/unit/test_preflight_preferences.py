"""Settings of `oppo dpo` and `oppo kto`: defaults, what is refused and by which words, the rows and memory of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from oppo_megatron.cli.kinds import guess_kind
from oppo_megatron.config.describe import SUPERVISED
from oppo_megatron.config.supervised import PreferenceConfig
from oppo_megatron.layout.holdings import supervised_holdings
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


def config(kind: str, folder: Path, **changes: Any) -> PreferenceConfig:
    found = SUPERVISED[kind].model_validate(settings(folder, **changes))
    assert isinstance(found, PreferenceConfig)
    return found


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_defaults(kind: str, folder: Path) -> None:
    chosen = config(kind, folder)
    assert supervised_problems(chosen) == []
    assert chosen.optimizer.lr == 1e-6 and getattr(chosen, kind).beta == 0.1
    adapted = config(kind, folder, model={"checkpoint": folder / "model", "lora": {"rank": 2}})
    assert adapted.optimizer.lr == 1e-5
    half = config(
        kind, folder, reference={"checkpoint": folder / "model"}, runtime={"dtype": "bfloat16", "device": "cpu"}
    )
    assert half.reference is not None and half.reference.dtype == "bfloat16" == half.model.dtype


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "dpo",
            {"runtime": {"device": "cpu", "micro_batch_tokens": 127}},
            "is 127, but a pair may have 128 tokens (twice",
        ),
        (
            "dpo",
            {"dpo": {"loss": "robust"}},
            "dpo.loss is robust, but dpo.label_smoothing is 0, with which it is sigmoid",
        ),
        ("dpo", {"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "is 0.1, but dpo.loss ipo has none; remove it"),
        ("dpo", {"dpo": {"loss": "hinge", "label_smoothing": 0.1}}, "dpo.loss hinge has none"),
        ("kto", {"batch_size": 1}, "batch_size is 1, but kto.loss kto compares rows of a batch"),
        (
            "dpo",
            {"reference": {"checkpoint": "FOLDER/other"}},
            "its vocabulary has 321 entries, but must equal the model's 320",
        ),
        ("dpo", {"reference": {"checkpoint": "FOLDER/none"}}, "reference.checkpoint `FOLDER/none` does not exist"),
        (
            "dpo",
            {"reference": {"checkpoint": "FOLDER/critic"}},
            "reference: its checkpoint is a Qwen2ForSequenceClassification",
        ),
        ("kto", {"reference_logprobs": "FOLDER"}, "reference_logprobs is FOLDER, which is a folder; name a file in it"),
        ("dpo", {"model": {"checkpoint": "FOLDER/model", "fresh_head": True}}, "fresh_head is true, but"),
        ("dpo", {"evaluation": {"fraction": 0.5}, "early_stop": {"metric": "los"}}, "early_stop.metric is 'los'"),
    ],
)
def test_what_is_refused(kind: str, change: dict[str, Any], words: str, folder: Path) -> None:
    placed = json.loads(json.dumps(change).replace("FOLDER", str(folder)))
    problems = supervised_problems(config(kind, folder, **placed))
    assert len(problems) == 1 and words.replace("FOLDER", str(folder)) in problems[0]


def test_kto_of_one_row_needs_no_others(folder: Path) -> None:
    assert supervised_problems(config("kto", folder, batch_size=1, kto={"loss": "apo_zero_unpaired"})) == []


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("dpo", {"beta": 0}),
        ("dpo", {"beta": -0.1}),
        ("dpo", {"label_smoothing": 0.5}),
        ("dpo", {"label_smoothing": -0.1}),
        ("dpo", {"nll": -1}),
        ("dpo", {"loss": "kto"}),
        ("kto", {"beta": 0}),
        ("kto", {"wanted": 0}),
        ("kto", {"loss": "sigmoid"}),
    ],
)
def test_numbers_out_of_range(kind: str, rule: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValidationError, match=rf"{kind}\.{next(iter(rule))}"):
        config(kind, folder, **{kind: rule})


def test_a_pair_counts_twice_in_the_plan_of_memory(folder: Path) -> None:
    few = {"batch_size": 1, "runtime": {"device": "cpu", "micro_batch_tokens": 4096}}
    (pair,), (row,) = (supervised_holdings(config(kind, folder, **few), on_cpu=False) for kind in ("dpo", "kto"))
    (sft,) = supervised_holdings(SUPERVISED["sft"].model_validate(settings(folder, **few)), on_cpu=False)
    assert row.memory == sft.memory
    assert pair.memory.activations == pytest.approx(2 * row.memory.activations, rel=0.05)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_file_is_known_by_its_section(kind: str, folder: Path, tmp_path: Path) -> None:
    tree = json.loads(json.dumps(settings(folder, **{kind: {"beta": 0.2}}), default=str))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    assert guess_kind(tmp_path / "x.yaml") == kind
