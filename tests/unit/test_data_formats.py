"""Data sets as they are published: recognised, said in a line, and read alike for `oppo sft`, `oppo rm` and `oppo train`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig
from oppo_megatron.data.examples import read_completions, read_pairs, read_prompts
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.errors import DataError
from tests.support.tokenizers import CharacterTokenizer

HEAD = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
SAID = [("human", "hi"), ("gpt", "hello"), ("human", "so?"), ("gpt", "bye")]
SHARED = [{"from": who, "value": text} for who, text in SAID]
SPOKEN = [{"role": {"human": "user", "gpt": "assistant"}[who], "content": text} for who, text in SAID]
CHAT = "<user>hi\3\n<assistant>hello\3\n<user>so?\3\n<assistant>"


def read(
    reader: Any, tmp_path: Path, *values: dict[str, Any], **settings: Any
) -> tuple[list[tuple[str, ...]], Quarantine]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    problems = RowProblems(Quarantine())
    examples = reader(DataConfig(path=path, **settings), CharacterTokenizer(), problems)
    problems.raise_errors()
    return [(example.prompt, *example.answers) for example in examples], problems.quarantine


def test_alpaca_joins_the_input(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
        {"instruction": "Greet.", "input": "", "output": "Hello."},
        {"instruction": "Part.", "output": "Bye."},
    ]
    texts, quarantine = read(read_completions, tmp_path, *rows)
    assert texts == [("Add.\n\n1 and 1", "2"), ("Greet.", "Hello."), ("Part.", "Bye.")]
    assert "Alpaca: prompt from 'instruction' and 'input', completion from 'output'" in quarantine.notes[0]
    assert quarantine.first == {"prompt": "Add.\n\n1 and 1", "completion": "2"}
    assert read(read_prompts, tmp_path, *rows)[0] == [(prompt,) for prompt, _ in texts]
    pair = {"instruction": "Add.", "input": "1 and 1", "chosen": "2", "rejected": "3"}
    assert read(read_pairs, tmp_path, pair)[0] == [("Add.\n\n1 and 1", "2", "3")]
    assert read(read_completions, tmp_path, rows[0], format="columns")[0] == [("Add.", "2")]
    dolly = {"instruction": "Add.", "context": "1 and 1", "response": "2", "category": "sum"}
    assert read(read_completions, tmp_path, dolly)[0] == [("Add.\n\n1 and 1", "2")]


@pytest.mark.parametrize(
    ("row", "title"),
    [
        ({"conversations": SHARED}, "ShareGPT: prompt from 'conversations'"),
        ({"conversations": [{"from": "system", "value": ""}, *SHARED]}, "ShareGPT"),
        ({"conversation": SPOKEN, "id": 7}, "chat messages: prompt from 'conversation'"),
        ({"messages": SPOKEN}, "chat messages: prompt from 'messages'"),
        ({"messages": SHARED}, "ShareGPT: prompt from 'messages'"),
        ({"prompt": "hi", "messages": SPOKEN}, "chat messages: prompt from 'messages'"),
    ],
)
def test_dialogues_in_a_column(tmp_path: Path, row: dict[str, Any], title: str) -> None:
    texts, quarantine = read(read_completions, tmp_path, row)
    assert texts == [(CHAT, "bye\3\n")]
    assert title in quarantine.notes[0] and "completion from its last assistant's turn" in quarantine.notes[0]
    every, _ = read(read_completions, tmp_path, row, turns="all")
    assert every == [("<user>hi\3\n<assistant>", "hello\3\n"), (CHAT, "bye\3\n")]
    if "prompt" not in row:
        assert read(read_prompts, tmp_path, row)[0] == [(CHAT,)]


def test_a_system_column_comes_first(tmp_path: Path) -> None:
    texts, _ = read(read_prompts, tmp_path, {"system": "Be kind.", "conversations": SHARED[:1]})
    assert texts == [("<system>Be kind.\3\n<user>hi\3\n<assistant>",)]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED[:3], "chosen": SHARED[3], "rejected": {"from": "gpt", "value": "no"}},
        {"prompt": SPOKEN[:3], "chosen": SPOKEN[3:], "rejected": [{"role": "assistant", "content": "no"}]},
        {"chosen": SPOKEN, "rejected": [*SPOKEN[:3], {"role": "assistant", "content": "no"}]},
        {"chosen": SHARED, "rejected": [*SHARED[:3], {"from": "gpt", "value": "no"}]},
    ],
)
def test_preferences_among_messages(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(read_pairs, tmp_path, row)[0] == [(CHAT, "bye\3\n", "no\3\n")]
    assert read(read_prompts, tmp_path, row)[0] == [(CHAT,)]
    assert read(read_completions, tmp_path, {**row, "conversations": None} if "prompt" in row else row)[0][-1][-1] in (
        "bye\3\n", "hello\3\n",
    )  # fmt: skip


def test_ultrafeedback_has_text_and_messages(tmp_path: Path) -> None:
    answers = {part: [SPOKEN[0], {"role": "assistant", "content": part}] for part in ("chosen", "rejected")}
    row = {"prompt": "hi", "prompt_id": "7", **answers, "score_chosen": 9.0}
    head = "<user>hi\3\n<assistant>"
    assert read(read_pairs, tmp_path, row)[0] == [(head, "chosen\3\n", "rejected\3\n")]
    assert read(read_completions, tmp_path, row)[0] == [(head, "chosen\3\n")]
    assert read(read_prompts, tmp_path, row)[0] == [(head,)]


def test_raw_dialogues(tmp_path: Path) -> None:
    row = {"chosen": HEAD + " Yes.", "rejected": HEAD + " No."}
    for reader, texts in (
        (read_prompts, (HEAD,)),
        (read_completions, (HEAD, " Yes.")),
        (read_pairs, (HEAD, " Yes.", " No.")),
    ):
        found, quarantine = read(reader, tmp_path, row)
        assert found == [texts] and "rows read as HH dialogues" in quarantine.notes[0]
    every, _ = read(read_completions, tmp_path, row, turns="all")
    assert every == [("\n\nHuman: a\n\nAssistant:", " b"), (HEAD, " Yes.")]
    assert read(read_pairs, tmp_path, {**row, "prompt": HEAD})[0] == [(HEAD, " Yes.", " No.")]
    with pytest.raises(DataError, match="no completion: column 'chosen' does not end with an assistant's turn"):
        read(read_completions, tmp_path, {**row, "chosen": HEAD + " Yes.\n\nHuman: d"})


def test_dialogues_that_part_early_are_counted_and_kept_whole(tmp_path: Path) -> None:
    early = {"chosen": HEAD + " Yes.", "rejected": HEAD.replace("b\n", "x\n") + " No."}
    same = {"chosen": HEAD + " Yes.", "rejected": HEAD + " Yes."}
    texts, quarantine = read(read_pairs, tmp_path, early, same)
    assert texts[0][0] == "\n\nHuman: a\n\nAssistant:" and texts[0][1].endswith("\n\nAssistant: Yes.")
    assert any("1 of 2 pairs part before their last turn" in note for note in quarantine.notes)
    assert any("1 of 2 pairs have the same text as chosen and rejected" in note for note in quarantine.notes)
    assert read(read_completions, tmp_path, early)[0] == [(HEAD, " Yes.")]


def test_an_empty_answer_is_no_fault_of_the_prompt(tmp_path: Path) -> None:
    row = {"chosen": HEAD + " Yes.", "rejected": HEAD}
    assert read(read_prompts, tmp_path, row)[0] == [(HEAD,)]
    assert read(read_completions, tmp_path, row)[0] == [(HEAD, " Yes.")]
    with pytest.raises(DataError, match="the rejected answer after the common dialogue is empty"):
        read(read_pairs, tmp_path, row)


@pytest.mark.parametrize("name", ["alpaca", "sharegpt", "messages", "hh"])
def test_a_format_that_does_not_fit_is_refused_with_what_it_needs(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=r"rows\.jsonl.*it has: .*question.*data\.|no column for the .*it has: question"
    ):
        read(read_prompts, tmp_path, {"question": "q", "answer": "a"}, format=name)


def test_a_missing_column_is_said_once(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c"}] + [{"prompt": "p", "other": "c"}] * 40
    with pytest.raises(DataError) as caught:
        read(read_completions, tmp_path, *rows)
    message = str(caught.value)
    assert message.count("column 'completion' is missing") == 1 and message.count("rows.jsonl:2: ") == 1
    assert "[and 39 more rows, the last " in message and "rows.jsonl:41]" in message
    assert message.startswith("40 rows cannot be used:") and "it has: prompt, other" in message.replace(
        "the row has", "it has"
    )


@pytest.mark.parametrize(("name", "num_rows", "num_learned"), [
    ("hh_helpful_train_subset", 3000, 3000), ("hh_harmless_test_subset", 1000, 997),
])  # fmt: skip
def test_real_dialogues_compressed(
    shared_data: Path, tmp_path: Path, name: str, num_rows: int, num_learned: int
) -> None:
    path = tmp_path / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress((shared_data / f"{name}.jsonl").read_bytes(), 1))
    config = DataConfig(path=path, bad_rows="quarantine")
    for reader, num in ((read_prompts, num_rows), (read_pairs, num_rows - 3), (read_completions, num_learned)):
        problems = RowProblems(Quarantine())
        examples = reader(config, CharacterTokenizer(), problems)
        assert len(examples) == num and len(problems.quarantine) == num_rows - num
        assert "rows read as HH dialogues" in problems.quarantine.notes[0]
        for example in examples:
            assert example.prompt.endswith("\n\nAssistant:") and example.prompt.startswith("\n\nHuman:")
            assert all("\n\nHuman:" not in answer for answer in example.answers)


def test_the_first_row_is_shown_as_it_was_cut(tmp_path: Path) -> None:
    path, quarantine = tmp_path / "rows.jsonl", Quarantine()
    path.write_text('{"prompt": ""}\n{"prompt": "abcdef", "completion": "ghi"}\n')
    config = DataConfig(path=path, bad_rows="quarantine", long_rows="truncate")
    prompts = PromptDataConfig(path=path, max_prompt_tokens=3, long_rows="truncate", bad_rows="quarantine")
    load_prompts(prompts, CharacterTokenizer(), quarantine=quarantine)
    assert quarantine.first == {"prompt": "def"}
    RowLoader(config, CharacterTokenizer(), 8, quarantine).completions()
    assert quarantine.first == {"prompt": "def"}, "of the first data set that was read"
    quarantine = Quarantine()
    RowLoader(config, CharacterTokenizer(), 8, quarantine).completions()
    assert quarantine.first == {"prompt": "cdef", "completion": "ghi"}, "cut to 8 tokens, EOS counted"
