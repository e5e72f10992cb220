"""Rows of messages through chat templates of many families: their columns reach it, and nothing is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig
from oppo_megatron.data.examples import Example, read_completions, read_pairs, read_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.policy.given_prompts import Wording, prompts_of_file
from tests.support.chat_templates import CHATML, LLAMA3, LLAMA32, QWEN3, QWEN25, R1_DISTILL, R1_FIRST
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer
from tests.unit.test_data_chat_template import TOOLS, chat_of

THOUGHT = "<think>Two and two.</think>4"
ASKED = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def read(
    tmp_path: Path, rows: list[dict[str, Any]], template: str, read: Any = read_completions, **settings: Any
) -> tuple[list[Example], Quarantine]:
    path, quarantine, tokenizer = write_rows(tmp_path, *rows), Quarantine(), CharacterTokenizer()
    tokenizer.chat = chat_of(template, **settings)
    problems = RowProblems(quarantine)
    config = PromptDataConfig(path=path, max_prompt_tokens=9999) if read is read_prompts else DataConfig(path=path)
    examples = read(config, tokenizer, problems)
    problems.raise_errors()
    return examples, quarantine


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
def test_tools_of_a_row_reach_the_template(tmp_path: Path, tools: Any) -> None:
    examples, quarantine = read(tmp_path, [{"messages": [ASKED, CALL], "tools": tools}], QWEN25)
    assert examples[0].prompt.startswith("<|im_start|>system\n# Tools\n<tools>\n{" + '"type": "function"')
    assert '"arguments": {"a": 2}' in examples[0].answers[0]
    assert any("column 'tools' is given to the chat template" in note for note in quarantine.notes)
    prompts, _ = read(tmp_path, [{"prompt": [ASKED], "tools": tools}], QWEN25, read_prompts)
    assert prompts[0].prompt.startswith("<|im_start|>system\n# Tools")


def test_tools_are_not_dropped_in_silence(tmp_path: Path) -> None:
    _, quarantine = read(tmp_path, [{"messages": [ASKED, ANSWER], "tools": TOOLS}] * 3, CHATML)
    assert [note for note in quarantine.notes if "'tools' is not shown to the model" in note]
    _, quarantine = read(tmp_path, [{"messages": [ASKED, ANSWER], "tools": []}], CHATML)
    assert not any("'tools'" in note for note in quarantine.notes)
    with pytest.raises(DataError, match="column 'tools' is text, but not JSON"):
        read(tmp_path, [{"messages": [ASKED, ANSWER], "tools": "add"}], QWEN25)


@pytest.mark.parametrize("nothing", ["", " ", "null", "[]"])
def test_a_row_without_tools_may_say_so_in_text(tmp_path: Path, nothing: str) -> None:
    examples, _ = read(tmp_path, [{"messages": [ASKED, ANSWER], "tools": nothing}], QWEN25)
    assert examples[0].prompt == read(tmp_path, [{"messages": [ASKED, ANSWER]}], QWEN25)[0][0].prompt
    _, quarantine = read(tmp_path, [{"messages": [ASKED, ANSWER], "tools": nothing}], CHATML)
    assert not any("'tools' is not shown" in note for note in quarantine.notes)


def test_a_column_of_text_for_other_templates_is_left_unread(tmp_path: Path) -> None:
    examples, quarantine = read(tmp_path, [{"messages": [ASKED, ANSWER], "documents": "a page"}], CHATML)
    assert len(examples) == 1 and any("'documents' is not shown to the model" in note for note in quarantine.notes)


def test_columns_and_arguments_of_rows_reach_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": [ASKED], "date_string": "1 May 1900", "topic": "sums"}]
    examples, quarantine = read(tmp_path, rows, LLAMA32, read_prompts)
    assert "Today Date: 1 May 1900" in examples[0].prompt
    assert [note for note in quarantine.notes if "given to" in note] == [quarantine.notes[-1]]
    rows = [{"prompt": [ASKED], "chat_template_kwargs": {"enable_thinking": flag}} for flag in (False, True)]
    examples, _ = read(tmp_path, rows, QWEN3, read_prompts, template_arguments={"enable_thinking": False})
    assert [example.prompt.endswith("</think>\n\n") for example in examples] == [True, False]


@pytest.mark.parametrize("template", [R1_DISTILL, R1_FIRST], ids=["opens the thought", "does not"])
def test_a_template_that_drops_the_thought_is_to_be_replaced(tmp_path: Path, template: str) -> None:
    rows = [{"messages": [ASKED, {"role": "assistant", "content": THOUGHT}]}] * 3
    with pytest.raises(DataError) as refusal:
        read(tmp_path, rows, template)
    assert "leaves out a part of the answer's content" in str(refusal.value) and "[and 2 more rows" in str(refusal.value)
    assert "Set tokenizer.chat_template to a template that renders answers whole: the rows are sound" in str(refusal.value)
    assert "Correct them" not in str(refusal.value)
    examples, _ = read(tmp_path, rows, QWEN3)
    assert "Two and two." in examples[0].answers[0]


def test_a_prompt_that_the_conversation_does_not_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the prompt ends with '<think>\\n', but the whole conversation has '4<\|end_of"):
        read(tmp_path, [{"messages": [ASKED, ANSWER]}], R1_DISTILL)


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ({**ANSWER, "reasoning_content": "Two and two."}, "reasoning_content"),
        ({**ANSWER, "reasoning": "Two and two."}, "reasoning"),
        (CALL, "tool_calls"),
    ],
)
def test_what_is_to_be_learned_is_not_lost(tmp_path: Path, answer: dict[str, Any], lost: str) -> None:
    with pytest.raises(DataError, match=f"leaves out a part of the answer's {lost}"):
        read(tmp_path, [{"messages": [ASKED, answer]}], CHATML)
    pair = {"prompt": [ASKED], "chosen": [answer], "rejected": [ANSWER]}
    with pytest.raises(DataError, match=f"leaves out a part of the answer's {lost}"):
        read(tmp_path, [pair], LLAMA3, read_pairs)
    known = QWEN25 if lost == "tool_calls" else QWEN3
    assert len(read(tmp_path, [{"messages": [ASKED, answer]}], known)[0]) == 1


def test_a_prompt_that_holds_the_words_of_an_answer_does_not_hide_their_loss(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves out a part of the answer's tool_calls"):
        read(tmp_path, [{"messages": [ASKED, CALL], "tools": TOOLS}], "{{ tools }}" + CHATML)
    with pytest.raises(DataError, match="leaves out a part of the answer's reasoning_content"):
        read(tmp_path, [{"messages": [ASKED, {**ANSWER, "reasoning_content": "2"}]}], CHATML)


def test_a_template_that_opens_a_thought_names_the_argument_that_does_not(tmp_path: Path) -> None:
    """Nemotron's templates end prompts with a thought, and rows without one have an empty thought."""
    opens = (
        "{% set enable_thinking = enable_thinking | default(true) %}{% for m in messages %}{{ '<' + m['role'] + '>' }}"
        "{{ '<think></think>' if m['role'] == 'assistant' }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{{ '\n' if enable_thinking else '</think>' }}{% endif %}"
    )
    rows = [{"messages": [ASKED, ANSWER]}]
    with pytest.raises(DataError, match=r"tokenizer.template_arguments .* without \(false\)"):
        read(tmp_path, rows, opens)
    examples, _ = read(tmp_path, rows, opens, template_arguments={"enable_thinking": False})
    assert examples[0].prompt.endswith("<assistant><think></think>") and examples[0].answers == ("4",)


def test_what_a_prompt_loses_is_noted_once(tmp_path: Path) -> None:
    named = {**ASKED, "name": "Zoe"}
    thought = [{"role": "assistant", "content": THOUGHT}, {"role": "user", "content": "3+3?"}]
    _, quarantine = read(tmp_path, [{"prompt": [named, *thought]}] * 2, QWEN3, read_prompts)
    lost = [note for note in quarantine.notes if "leaves it out" in note]
    assert [note.split(" is not")[0] for note in lost] == ["'name' of messages", "text of 'assistant' messages"]
    _, quarantine = read(tmp_path, [{"prompt": [{"role": "system", "content": "Be kind."}, ASKED]}], R1_FIRST, read_prompts)
    assert any("text of 'system' messages is not shown" in note for note in quarantine.notes)


def test_prompts_of_a_file_get_the_columns_of_their_rows(tmp_path: Path) -> None:
    path, tokenizer, told = write_rows(tmp_path, {"prompt": "2+2?", "tools": TOOLS}), CharacterTokenizer(), list[str]()
    tokenizer.chat = chat_of(QWEN25)
    (asked,) = prompts_of_file(path, None, Wording(as_chat=True), tokenizer, note=told.append)
    assert asked.text.startswith("<|im_start|>system\n# Tools") and "column 'tools' is given to the chat template" in told[-1]
    (asked,) = prompts_of_file(path, None, Wording(), tokenizer, note=told.append)
    assert asked.text == "2+2?"
    tokenizer.chat = chat_of(None)
    with pytest.raises(ConfigError, match="--as-chat put turns into a chat template"):
        prompts_of_file(path, None, Wording(as_chat=True), tokenizer)
