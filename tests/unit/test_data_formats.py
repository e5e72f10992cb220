"""Columns and layouts of data sets: found by name and form, read in every documented way, refused with the setting to change."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import KNOWN_NAMES, DataConfig, PromptDataConfig, TokenizerConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.columns import Table
from oppo_megatron.data.examples import read_completions, read_pairs, read_prompts
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine, Row, RowProblems
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.rewards.functions import build_reward_functions
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

USER, SO = {"role": "user", "content": "hi"}, {"role": "user", "content": "so?"}
HELLO, BYE = {"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "bye"}
SPOKEN = [USER, HELLO, SO, BYE]
SHARED = [{"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]} for turn in SPOKEN]
CHAT_HEAD = "<user>hi\3\n<assistant>"
CHAT = f"{CHAT_HEAD}hello\3\n<user>so?\3\n<assistant>"
HEAD = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def rows_of(*values: dict[str, Any]) -> Table:
    return Table([Row(i, "f.jsonl", i + 1, value) for i, value in enumerate(values)])


def read_all(reader: Any, tmp_path: Path, *values: dict[str, Any], **settings: Any) -> tuple[list[Any], RowProblems]:
    problems = RowProblems(Quarantine())
    examples = reader(DataConfig(path=write_rows(tmp_path, *values), **settings), CharacterTokenizer(), problems)
    return [(example.prompt, *example.answers) for example in examples], problems


def read(reader: Any, tmp_path: Path, *values: dict[str, Any], **settings: Any) -> tuple[list[Any], Quarantine]:
    texts, problems = read_all(reader, tmp_path, *values, **settings)
    problems.raise_errors()
    return texts, problems.quarantine


def test_known_names_in_the_documented_order_and_what_there_is_instead() -> None:
    for part, names in KNOWN_NAMES.items():
        for i, name in enumerate(names):
            assert rows_of({later: "x" for later in reversed(names[i:])}).find(part, {}) == name
    assert rows_of({"prompt": "x"}, {"question": "x"}, {"question": "x"}).find("prompt", {}) == "question"
    with pytest.raises(DataError, match=r"it has: qestion, other.*nearest is 'qestion': set data.columns.prompt=qestion"):
        rows_of({"qestion": "x", "other": "y"}).require("prompt", {})
    with pytest.raises(DataError, match=r"data.columns.prompt=questio is not a column.*nearest is 'question'"):
        rows_of({"question": "x"}).require("prompt", {"prompt": "questio"})
    with pytest.raises(DataError, match=r"it has: zzz\. Set data.columns.chosen"):
        rows_of({"zzz": "x"}).require("chosen", {})


def test_each_bad_value_is_refused_with_its_reason(tmp_path: Path) -> None:
    bad = [
        ({"other": 1}, "missing"), ({"prompt": " \n"}, "empty"), ({"prompt": None}, "empty"), ({"prompt": []}, "empty"),
        ({"prompt": 5}, "int"), ({"prompt": ["a"]}, "neither text"), ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": [{"content": "x"}]}, "no role"), ({"prompt": [{"role": "user"}]}, "no text content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"), ({"prompt": [HELLO]}, "nothing before"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, "no tools here"),
    ]  # fmt: skip
    texts, problems = read_all(read_prompts, tmp_path, {"prompt": "ok"}, *(value for value, _ in bad))
    assert texts == [("ok",)]
    with pytest.raises(DataError) as caught:
        problems.raise_errors()
    lines = [line for line in str(caught.value).splitlines() if "rows.jsonl:" in line]
    lines.sort(key=lambda line: int(line.split("rows.jsonl:")[1].partition(":")[0]))
    for number, (line, (_, reason)) in enumerate(zip(lines, bad, strict=True), start=2):
        assert f"rows.jsonl:{number}:" in line and reason in line


def test_a_missing_column_is_said_once(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c"}] + [{"prompt": "p", "other": "c"}] * 40
    with pytest.raises(DataError) as caught:
        read(read_completions, tmp_path, *rows)
    message = str(caught.value)
    assert message.count("column 'completion' is missing") == 1 and message.count("rows.jsonl:2: ") == 1
    assert "[and 39 more rows, the last " in message and "rows.jsonl:41]" in message
    assert message.startswith("40 rows cannot be used:") and "the row has: prompt, other" in message


def test_templates_replace_only_their_mark_and_must_have_it(tmp_path: Path) -> None:
    row, templates = {"question": "{completion}", "answer": "{x}"}, ("{0} {prompt} {}", " {{{completion}}}")
    texts, _ = read(read_completions, tmp_path, row, prompt_template=templates[0], completion_template=templates[1])
    assert texts == [("{0} {completion} {}", " {{{x}}}")]
    with pytest.raises(ConfigError) as caught:
        read(read_completions, tmp_path, row, prompt_template="Q:", completion_template="{prompt}")
    assert len(caught.value.problems) == 2
    assert read(read_prompts, tmp_path, {"prompt": "x"}, completion_template="unused")[0] == [("x",)]


def test_alpaca_joins_the_input_of_the_rows_that_have_one(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 1", "output": "2"}, {"instruction": "Greet.", "input": "", "output": "Hello."},
        {"instruction": "Part.", "output": "Bye."},
    ]  # fmt: skip
    texts, quarantine = read(read_completions, tmp_path, *rows)
    assert texts == [("Add.\n\n1 and 1", "2"), ("Greet.", "Hello."), ("Part.", "Bye.")]
    assert "Alpaca: prompt from 'instruction' and 'input', completion from 'output'" in quarantine.notes[0]
    assert quarantine.first == {"prompt": "Add.\n\n1 and 1", "completion": "2"}


@pytest.mark.parametrize(("row", "title"), [
    ({"conversations": [{"from": "system", "value": ""}, *SHARED]}, "ShareGPT: prompt from 'conversations'"),
    ({"conversation": SPOKEN, "id": 7}, "chat messages: prompt from 'conversation'"),
    ({"messages": SHARED}, "ShareGPT: prompt from 'messages'"),
    ({"prompt": "hi", "messages": SPOKEN}, "chat messages: prompt from 'messages'"),
])  # fmt: skip
def test_dialogues_in_a_column(tmp_path: Path, row: dict[str, Any], title: str) -> None:
    texts, quarantine = read(read_completions, tmp_path, row)
    assert texts == [(CHAT, "bye\3\n")]
    assert title in quarantine.notes[0] and "completion from its last assistant's turn" in quarantine.notes[0]
    every, quarantine = read(read_completions, tmp_path, row, turns="all")
    assert every == [(CHAT_HEAD, "hello\3\n"), (CHAT, "bye\3\n")]
    assert "completion from each assistant's turn" in quarantine.notes[0]
    if "prompt" not in row:
        assert read(read_prompts, tmp_path, row)[0] == [(CHAT,)]


@pytest.mark.parametrize(("row", "reason", "prompts"), [
    ({"chosen": [USER, HELLO], "rejected": [USER]}, "the rejected answer after the common dialogue is empty", [CHAT_HEAD]),
    ({"chosen": HEAD + " Yes.", "rejected": HEAD}, "the rejected answer after the common dialogue is empty", [HEAD]),
    ({"chosen": [USER, HELLO, USER, BYE], "rejected": [USER, HELLO, SO, BYE]}, "part at the user's turn 3", []),
])  # fmt: skip
def test_dialogues_that_part_where_nothing_is_answered(tmp_path: Path, row: Any, reason: str, prompts: list[str]) -> None:
    texts, problems = read_all(read_pairs, tmp_path, row)
    with pytest.raises(DataError, match=reason):
        problems.raise_errors()
    assert texts == [] and read_all(read_prompts, tmp_path, row)[0] == [(prompt,) for prompt in prompts]


def test_dialogues_are_cut_those_that_part_early_are_kept_whole_and_without_an_answer_refused(tmp_path: Path) -> None:
    row = {"chosen": HEAD + " Yes.", "rejected": HEAD + " No."}
    found, quarantine = read(read_pairs, tmp_path, row)
    assert found == [(HEAD, " Yes.", " No.")] and "rows read as HH dialogues" in quarantine.notes[0]
    every, _ = read(read_completions, tmp_path, row, turns="all")
    assert every == [("\n\nHuman: a\n\nAssistant:", " b"), (HEAD, " Yes.")]
    with pytest.raises(DataError, match="no completion: column 'chosen' does not end with an assistant's turn"):
        read(read_completions, tmp_path, {**row, "chosen": HEAD + " Yes.\n\nHuman: d"})
    with pytest.raises(DataError, match="share no dialogue"):
        read(read_pairs, tmp_path, row, {"chosen": "a b", "rejected": "a c"})
    row = {"chosen": [USER, HELLO], "rejected": [USER, HELLO, USER, BYE]}  # which begins as the other does
    ((prompt, chosen, rejected),) = read(read_pairs, tmp_path, row)[0]
    assert (prompt, chosen) == (CHAT_HEAD, "hello\3\n") and rejected.startswith(chosen) and rejected.endswith("bye\3\n")
    early = {"chosen": HEAD + " Yes.", "rejected": HEAD.replace("b\n", "x\n") + " No."}
    texts, quarantine = read(read_pairs, tmp_path, early, {"chosen": HEAD + " Yes.", "rejected": HEAD + " Yes."})
    assert texts[0][0] == "\n\nHuman: a\n\nAssistant:" and texts[0][1].endswith("\n\nAssistant: Yes.")
    assert any("1 of 2 pairs part before their last turn" in note for note in quarantine.notes)
    assert any("1 of 2 pairs have the same text as chosen and rejected" in note for note in quarantine.notes)
    with pytest.raises(DataError, match="does not end with an assistant"):
        read(read_completions, tmp_path, {"messages": [USER, HELLO]}, {"messages": [USER]})
    for name in ("alpaca", "sharegpt", "messages", "hh"):
        with pytest.raises(DataError, match=r"rows\.jsonl.*it has: .*question.*data\.|no column for the .*it has: question"):
            read(read_prompts, tmp_path, {"question": "q", "answer": "a"}, format=name)


@pytest.mark.parametrize(("name", "num_rows", "num_learned"), [
    ("hh_helpful_train_subset", 3000, 3000), ("hh_harmless_test_subset", 1000, 997),
])  # fmt: skip
def test_real_dialogues_compressed(shared_data: Path, tmp_path: Path, name: str, num_rows: int, num_learned: int) -> None:
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
            if reader is read_pairs:
                wholes = tuple(example.prompt + answer for answer in example.answers)
                assert wholes == (example.row.values["chosen"], example.row.values["rejected"])


def test_real_prompt_and_response_rows(shared_data: Path) -> None:
    problems = RowProblems(Quarantine())
    config = DataConfig(path=shared_data / "sft_dolly_hhrlhf_small.jsonl", bad_rows="quarantine")
    examples = read_completions(config, CharacterTokenizer(), problems)
    assert len(examples) + len(problems.quarantine) == 1000
    assert all(example.answers == (example.row.values["response"],) for example in examples)


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


MISTAKES: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "no prompt column": ("train", [{"text": "a"}], {}, "no column for the prompt .*it has: text. .*data.columns.prompt"),
    "no rejected": ("rm", [{"prompt": "a", "chosen": "b"}], {}, "no column for the rejected .*it has: prompt, chosen"),
    "rows under a key": ("train", [{"data": [{"prompt": "a"}, {"prompt": "b"}]}], {}, r"jq \.data .*rows\.json"),
    "nothing but empty prompts": ("train", [{"prompt": ""}], {}, r"column 'prompt' is empty\nCorrect them\.$"),
    "an unknown speaker": ("train", [{"conversations": [{"from": "robot", "value": "a"}]}], {}, "from 'robot'; known are human"),
    "a number as Alpaca's input": ("sft",
        [{"instruction": "a", "input": "x", "output": "b"}, {"instruction": "a", "input": 5, "output": "b"}], {},
        "rows.jsonl:2: column 'input' is not text, but int"),
    "text against messages": ("rm", [{"chosen": "a", "rejected": [USER, HELLO]}], {}, "one is text and the other a list"),
    "pairs with nothing in common": ("rm", [{"chosen": [USER, HELLO], "rejected": [HELLO, USER]}], {},
        "have no beginning in common"),
    "steps without a separator": ("rm", [{"prompt": "a", "completions": ["b"], "labels": [1]}], {},
        "no column for the chosen .*set separator, as in"),
    "judged completions for pairs": ("rm", [{"prompt": "a", "completion": "b", "label": 1}], {}, "set dpo.loss=kto"),
    "no labels": ("prm", [{"prompt": "a", "completions": ["b"]}], {}, "no column for the labels .*it has: prompt, completions"),
    "a text as steps": ("prm", [{"prompt": "a", "completions": "b", "labels": [1]}], {}, "not a list with an item per step"),
    "a number as a step": ("prm", [{"prompt": "a", "completions": ["b", 3], "labels": [1, 0]}], {}, "step 2 .* but int"),
    "an empty step": ("prm", [{"prompt": "a", "completions": ["b", " "], "labels": [1, 0]}], {}, "step 2 .* is empty"),
    "more labels than steps": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [1, 0]}], {}, "1 steps .* but 2 labels"),
    "a label beyond 1": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [-1]}], {}, "label 1 .* is -1, but must be"),
    "a word as label": ("prm", [{"prompt": "a", "completions": ["b"], "labels": ["+"]}], {}, "label 1 .* is '[+]', but must be"),
    "no label at all": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [None]}], {}, "no label that is not null"),
    "two lines in a step": ("prm", [{"prompt": "a", "completions": ["b\nc", "d"], "labels": [1, 0]}], {},
        "the text has 3 steps by the separator '.n', but the row has 2: .* bad_rows=quarantine|Correct them"),
    "a long prompt": ("train", [{"prompt": "a" * 9}], {"max_prompt_tokens": 5}, "9 tokens, more than data.max_prompt_tokens=5"),
    "a long row": ("sft", [{"prompt": "a" * 1000, "completion": "b"}], {}, "have 1002 tokens, more than max_tokens=1000"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_rows(tmp_path: Path, mistake: str) -> None:
    kind, rows, settings, says = MISTAKES[mistake]
    path, tokenizer = write_rows(tmp_path, *rows), CharacterTokenizer()
    with pytest.raises((DataError, ConfigError), match=f"(?s){says}") as caught:
        if kind == "train":
            load_prompts(PromptDataConfig(path=path, **settings), tokenizer, quarantine=Quarantine())
        loader = RowLoader(DataConfig(path=path, **settings), tokenizer, 1000, Quarantine())
        {"prm": lambda: loader.steps("\n"), "sft": loader.completions, "rm": loader.pairs}[kind]()
    assert str(caught.value).count("rows.jsonl") <= 2


def test_a_verifiers_missing_column_is_said_once_with_the_nearest(tmp_path: Path) -> None:
    path = write_rows(tmp_path, *[{"prompt": "a", "answers": "1"}] * 50)
    check = build_reward_functions([RewardPart(kind="verifier", name="gsm8k")]).check
    with pytest.raises(DataError) as caught:
        load_prompts(PromptDataConfig(path=path), CharacterTokenizer(), quarantine=Quarantine(), check=check)
    said = str(caught.value)
    assert said.startswith("50 rows cannot be used:\n") and said.count("no column 'answer'") == 1
    assert "[and 49 more rows, the last " in said and "the nearest is `answer: answers`" in said
    assert said.endswith("Correct them."), "to set all rows aside is no remedy"


TEMPLATES = {
    "not Jinja": ("{% for m in messages %}\n{{ m.content }",
        r"_template, line 2: not a Jinja template .*correct `{{ m.content }`, or set"),
    "no filter of this name": ("{{ messages | shout }}", "No filter named 'shout'"),
    "a mistake of types": ("{{ messages[0]['content'] + 1 }}", "refuses the messages: TypeError: .*set tokenizer.chat_template"),
    "a division": ("{{ 1 / 0 }}", "refuses the messages: ZeroDivisionError"),
    "a part that is not there": ("{{ messages[0].tools.name }}", "refuses the messages: .*has no attribute 'tools'"),
    "messages that it refuses": ("{{ raise_exception('no users') }}", "refuses the messages: no users; correct them, or set"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TEMPLATES)
def test_a_broken_chat_template_is_said_once(tmp_path: Path, mistake: str) -> None:
    template, says = TEMPLATES[mistake]
    (tmp_path / "sentencepiece").mkdir()
    train_sentencepiece(["hello there"] * 9, tmp_path / "sentencepiece" / "tokenizer.model", 275)
    path = write_rows(tmp_path, *[{"messages": [USER]}] * 30)
    for folder in (save_byte_level(tmp_path / "transformers", ["hello there"], eos_token="<|end|>"), tmp_path / "sentencepiece"):
        with pytest.raises((DataError, ConfigError), match=says) as caught:
            tokenizer = load_tokenizer(TokenizerConfig(path=folder, chat_template=template))
            load_prompts(PromptDataConfig(path=path), tokenizer, quarantine=Quarantine())
        assert len(str(caught.value).splitlines()) <= 3
