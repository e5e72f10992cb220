"""Rows of `oppo dpo`: pairs that differ, completions with labels, pairs as two rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, TokenizerConfig
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Marked, RowLoader
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from oppo_megatron.errors import DataError
from tests.support.rows import write_rows

LOADERS = {"dpo": RowLoader.unequal_pairs, "kto": RowLoader.marked}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
WANTED = {"prompt": "1+1=", "completion": "2", "label": True}
UNWANTED = {"prompt": "2+1=", "completion": "4", "label": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece([f"{n}+{n + 1}={2 * n + 1} wanted" for n in range(80)], path, 290)
    return load_tokenizer(TokenizerConfig(path=path, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))


def load(
    kind: str, rows: list[Any], folder: Path, tokenizer: Tokenizer, most: int = 60, **settings: Any
) -> tuple[list[Any], Quarantine]:
    quarantine = Quarantine()
    config = DataConfig(path=write_rows(folder, *rows), **settings)
    return list(LOADERS[kind](RowLoader(config, tokenizer, most, quarantine))), quarantine


def shown(rows: list[Marked], tokenizer: Tokenizer) -> list[tuple[str, str, list[int]]]:
    assert all(row.completion[-1] == tokenizer.eos_id for row in rows)
    return [(tokenizer.decode(row.prompt), tokenizer.decode(row.completion[:-1]), row.wanted) for row in rows]


@pytest.mark.parametrize("labels", [(True, False), (1, 0), ("true", "False"), ("1", "0"), (1.0, 0.0)])
def test_a_label_says_whether_a_completion_is_wanted(tmp_path: Path, tokenizer: Tokenizer, labels: tuple[Any, Any]) -> None:
    rows = [WANTED | {"label": labels[0]}, UNWANTED | {"label": labels[1]}]
    found, quarantine = load("kto", rows, tmp_path, tokenizer)
    assert shown(found, tokenizer) == [("1+1=", "2", [1]), ("2+1=", "4", [0])]
    assert quarantine.first == {"prompt": "1+1=", "completion": "2", "label": "wanted"}
    assert "1 of 2 completions are wanted, 1 are not" in quarantine.notes


def test_a_label_in_another_column(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "completion": "b", "thumb": 1}, {"prompt": "a", "completion": "b", "thumb": 0}]
    found, quarantine = load("kto", rows, tmp_path, tokenizer, columns={"label": "thumb"})
    assert [row.wanted for row in found] == [[1], [0]]
    assert "1 completions are wanted in one row and unwanted in another" in quarantine.notes
    with pytest.raises(DataError, match=r"no column for the label .*set data.columns.label|Set data.columns.label"):
        load("kto", rows, tmp_path, tokenizer)


@pytest.mark.parametrize("form", ["columns", "hh", "messages"])
def test_a_pair_is_two_rows_of_kto(tmp_path: Path, tokenizer: Tokenizer, form: str) -> None:
    pair: dict[str, Any] = PAIR
    if form == "hh":
        pair = {name: f"\n\nHuman: 1+1=\n\nAssistant: {PAIR[name]}" for name in ("chosen", "rejected")}
    if form == "messages":
        asked = {"role": "user", "content": "1+1="}
        pair = {name: [asked, {"role": "assistant", "content": PAIR[name]}] for name in ("chosen", "rejected")}
    found, _ = load("kto", [pair], tmp_path, tokenizer)
    assert [(answer.strip(), wanted) for _, answer, wanted in shown(found, tokenizer)] == [("2", [1]), ("3", [0])]
    assert found[0].prompt == found[1].prompt


SAME = PAIR | {"rejected": "2"}
BAD = {
    "dpo, the same answer twice": ("dpo", [PAIR, SAME, SAME], r"rows.jsonl:2: chosen and rejected are the same.*and 1 more"),
    "dpo, an empty answer": ("dpo", [PAIR, PAIR | {"chosen": " "}], r"rows.jsonl:2: column 'chosen' is empty"),
    "dpo, no rejected": ("dpo", [{"prompt": "a", "chosen": "b"}], r"no column for the rejected .*data.columns.rejected"),
    "dpo, one without a rejected": ("dpo", [PAIR, {"prompt": "a", "chosen": "b"}], r":2: column 'rejected' is missing"),
    "dpo, completions": ("dpo", [WANTED, UNWANTED], r"no column for the chosen"),
    "kto, the same answer twice": ("kto", [PAIR, SAME], r"rows.jsonl:2: chosen and rejected are the same"),
    "kto, an empty completion": ("kto", [WANTED, UNWANTED, WANTED | {"completion": ""}], r":3: column 'completion' is empty"),
    "kto, no label": ("kto", [{"prompt": "a", "completion": "b"}], r"no column for the label \(looked for label\)"),
    "kto, one without a label": ("kto", [WANTED, UNWANTED, {"prompt": "a", "completion": "b"}], r":3: column 'label' is missing"),
    "kto, a label between": ("kto", [WANTED, UNWANTED | {"label": 0.5}], r":2: column 'label' is 0.5, but must say if"),
    "kto, a label of words": ("kto", [WANTED, UNWANTED | {"label": "good"}], r"'good', but must say if"),
    "kto, all wanted": ("kto", [WANTED, WANTED], r"all 2 rows are wanted: KTO learns from both"),
    "kto, none wanted": ("kto", [UNWANTED], r"all 1 rows are unwanted"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    kind, rows, words = BAD[case]
    with pytest.raises(DataError, match=words):
        load(kind, rows, tmp_path, tokenizer)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_what_is_refused_can_be_set_aside(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    found, quarantine = load(kind, [SAME, PAIR], tmp_path, tokenizer, bad_rows="quarantine")
    assert len(found) == (1 if kind == "dpo" else 2)
    assert [entry["line"] for entry in quarantine.entries] == [1]
    assert quarantine.entries[0]["reason"] == "chosen and rejected are the same: such a pair prefers nothing"


def test_answers_that_are_cut_to_the_same_tokens_are_no_pair(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt, answer = "1+1=", "2 wanted 2 wanted 2 wanted"
    rows = [PAIR, {"prompt": prompt, "chosen": f"{answer} 7", "rejected": f"{answer} 8"}]
    assert len(load("dpo", rows, tmp_path, tokenizer, long_rows="truncate")[0]) == 2
    with pytest.raises(DataError, match="the same once they are cut to max_tokens=12"):
        load("dpo", rows, tmp_path, tokenizer, most=12, long_rows="truncate")


def test_a_long_row_of_a_pair_is_set_aside_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [PAIR, PAIR | {"rejected": "2 wanted " * 9}]
    found, quarantine = load("kto", rows, tmp_path, tokenizer, most=20, long_rows="quarantine")
    assert [row.wanted for row in found] == [[1], [0], [1]] and len(quarantine.entries) == 1
