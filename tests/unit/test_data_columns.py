"""Columns: found by name, read in every documented form, refused with the setting to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import KNOWN_NAMES, ColumnsConfig, DataConfig
from oppo_megatron.data.columns import Table
from oppo_megatron.data.examples import read_completions, read_pairs, read_prompts
from oppo_megatron.data.rows import Quarantine, Row, RowProblems
from oppo_megatron.errors import ConfigError, DataError
from tests.support.tokenizers import CharacterTokenizer

USER = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
SO = {"role": "user", "content": "so?"}
BYE = {"role": "assistant", "content": "bye"}
CHAT_HEAD = "<user>hi\3\n<assistant>"


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(i, "f.jsonl", i + 1, value) for i, value in enumerate(values)]


def read(reader, tmp_path: Path, *values: dict[str, Any], **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    problems = RowProblems(Quarantine())
    examples = reader(DataConfig(path=path, **settings), CharacterTokenizer(), problems)
    return [(example.prompt, *example.answers) for example in examples], problems


@pytest.mark.parametrize("part", KNOWN_NAMES)
def test_known_names_in_the_documented_order(part: str) -> None:
    names = KNOWN_NAMES[part]
    for i, name in enumerate(names):
        rows = rows_of({later: "x" for later in reversed(names[i:])})
        assert Table(rows).find(part, ColumnsConfig()) == name


def test_one_stray_row_does_not_choose_the_column() -> None:
    rows = rows_of({"prompt": "x"}, {"question": "x"}, {"question": "x"})
    assert Table(rows).find("prompt", ColumnsConfig()) == "question"


def test_no_column_names_what_there_is_the_setting_and_the_nearest() -> None:
    with pytest.raises(
        DataError, match=r"it has: qestion, other.*nearest is 'qestion': set data.columns.prompt=qestion"
    ):
        Table(rows_of({"qestion": "x", "other": "y"})).require("prompt", ColumnsConfig())
    with pytest.raises(DataError, match=r"data.columns.prompt=questio is not a column.*nearest is 'question'"):
        Table(rows_of({"question": "x"})).require("prompt", ColumnsConfig(prompt="questio"))
    with pytest.raises(DataError, match=r"it has: zzz\. Set data.columns.chosen"):
        Table(rows_of({"zzz": "x"})).require("chosen", ColumnsConfig())


def test_each_bad_value_is_refused_with_its_reason(tmp_path: Path) -> None:
    bad = [
        ({"other": 1}, "missing"),
        ({"prompt": " \n"}, "empty"),
        ({"prompt": None}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": 5}, "int"),
        ({"prompt": ["a"]}, "neither text"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": [{"content": "x"}]}, "no role"),
        ({"prompt": [{"role": "user"}]}, "no text content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"prompt": [HELLO]}, "nothing before"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, "no tools here"),
    ]
    texts, problems = read(read_prompts, tmp_path, {"prompt": "ok"}, *(value for value, _ in bad))
    assert texts == [("ok",)]
    with pytest.raises(DataError) as caught:
        problems.raise_errors()
    lines = [line for line in str(caught.value).splitlines() if "rows.jsonl:" in line]
    assert len(lines) == len(bad)
    lines.sort(key=lambda line: int(line.split("rows.jsonl:")[1].partition(":")[0]))
    for number, (line, (_, reason)) in enumerate(zip(lines, bad, strict=True), start=2):
        assert f"rows.jsonl:{number}:" in line and reason in line


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"messages": [USER, HELLO]},
        {"prompt": [USER]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
        {"chosen": [USER, HELLO], "rejected": [USER, BYE]},
    ],
)
def test_forms_of_a_chat_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(read_prompts, tmp_path, row)[0] == [(CHAT_HEAD,)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, HELLO]},
        {"prompt": [USER], "completion": [HELLO]},
        {"prompt": "hi", "completion": [HELLO]},
        {"prompt": [USER], "response": "hello"},
    ],
)
def test_forms_of_a_chat_completion(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(read_completions, tmp_path, row)[0] == [(CHAT_HEAD, "hello\3\n")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [HELLO], "rejected": [BYE]},
        {"prompt": "hi", "chosen": [USER, HELLO], "rejected": [USER, BYE]},
        {"chosen": [USER, HELLO], "rejected": [USER, BYE]},
    ],
)
def test_forms_of_a_chat_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(read_pairs, tmp_path, row)[0] == [(CHAT_HEAD, "hello\3\n", "bye\3\n")]


def test_a_dialogue_that_begins_the_other_still_has_an_answer(tmp_path: Path) -> None:
    row = {"chosen": [USER, HELLO], "rejected": [USER, HELLO, USER, BYE]}
    ((prompt, chosen, rejected),) = read(read_pairs, tmp_path, row)[0]
    assert (prompt, chosen) == (CHAT_HEAD, "hello\3\n")
    assert rejected.startswith(chosen) and rejected.endswith("bye\3\n")


@pytest.mark.parametrize(
    ("row", "reason", "prompt"),
    [
        ({"chosen": [USER, HELLO], "rejected": [USER]}, "the rejected answer after the common dialogue is empty", CHAT_HEAD),
        ({"chosen": [USER, HELLO, USER, BYE], "rejected": [USER, HELLO, SO, BYE]}, "part at the user's turn 3", None),
    ],
)
def test_dialogues_that_part_where_nothing_is_answered(
    tmp_path: Path, row: dict[str, Any], reason: str, prompt: str | None
) -> None:
    texts, problems = read(read_pairs, tmp_path, row)
    with pytest.raises(DataError, match=reason):
        problems.raise_errors()
    assert texts == [] and read(read_prompts, tmp_path, row)[0] == [(prompt,)] * (prompt is not None)


def test_text_pairs_with_and_without_a_prompt(tmp_path: Path) -> None:
    head = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    dialogue = {"chosen": head + " Yes.", "rejected": head + " Yet."}
    assert read(read_pairs, tmp_path, dialogue)[0] == [(head, " Yes.", " Yet.")]
    assert read(read_prompts, tmp_path, dialogue)[0] == [(head,)]
    plain = {"question": "q", "chosen": "c", "rejected": "r"}
    assert read(read_pairs, tmp_path, plain)[0] == [("q", "c", "r")]
    texts, problems = read(read_pairs, tmp_path, dialogue, {"chosen": "a b", "rejected": "a c"})
    assert len(texts) == 1
    with pytest.raises(DataError, match="share no dialogue"):
        problems.raise_errors()


def test_templates_replace_only_their_mark(tmp_path: Path) -> None:
    texts, _ = read(
        read_completions,
        tmp_path,
        {"question": "{completion}", "answer": "{x}"},
        prompt_template="{0} {prompt} {}",
        completion_template=" {{{completion}}}",
    )
    assert texts == [("{0} {completion} {}", " {{{x}}}")]


def test_a_template_without_its_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            read_completions,
            tmp_path,
            {"prompt": "x", "completion": "y"},
            prompt_template="Q:",
            completion_template="{prompt}",
        )
    assert len(caught.value.problems) == 2
    assert read(read_prompts, tmp_path, {"prompt": "x"}, completion_template="unused")[0] == [("x",)]


def test_a_completion_must_be_somewhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column for the completion"):
        read(read_completions, tmp_path, {"prompt": "x"})
    _, problems = read(read_completions, tmp_path, {"messages": [USER, HELLO]}, {"messages": [USER]})
    with pytest.raises(DataError, match="does not end with an assistant"):
        problems.raise_errors()


@pytest.mark.parametrize(("name", "num_rows"), [("hh_helpful_train_subset", 3000), ("hh_harmless_test_subset", 1000)])
def test_real_dialogue_pairs(shared_data: Path, name: str, num_rows: int) -> None:
    problems = RowProblems(Quarantine())
    config = DataConfig(path=shared_data / f"{name}.jsonl", bad_rows="quarantine")
    examples = read_pairs(config, CharacterTokenizer(), problems)
    assert len(examples) == num_rows - 3
    assert {entry["reason"].split(" answer")[0] for entry in problems.quarantine.entries} <= {
        "the chosen",
        "the rejected",
    }
    for example in examples:
        assert example.prompt.endswith("\n\nAssistant:") and example.prompt.startswith("\n\nHuman:")
        assert example.prompt + example.answers[0] == example.row.values["chosen"]
        assert example.prompt + example.answers[1] == example.row.values["rejected"]


def test_real_prompt_and_response_rows(shared_data: Path) -> None:
    problems = RowProblems(Quarantine())
    config = DataConfig(path=shared_data / "sft_dolly_hhrlhf_small.jsonl", bad_rows="quarantine")
    examples = read_completions(config, CharacterTokenizer(), problems)
    assert len(examples) + len(problems.quarantine) == 1000
    assert all(example.answers == (example.row.values["response"],) for example in examples)
