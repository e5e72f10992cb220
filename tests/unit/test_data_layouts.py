"""Published layouts of rows: each command reads the same prompt, and a column that carries meaning is read or named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.examples import read_completions, read_marked, read_pairs, read_prompts, read_steps
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.errors import ConfigError, DataError, RewardError
from oppo_megatron.policy.given_prompts import Wording, prompts_of_file
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.rule_parts import column
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer

Row = dict[str, Any]
USER, SYSTEM = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Be kind."}
YES, NO = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
CHAT = "<user>2+2?\3\n<assistant>"
WITH_SYSTEM = f"<system>Be kind.\3\n{CHAT}"
HH = "\n\nHuman: 2+2?\n\nAssistant:"
GOOD, BAD = "4\3\n", "5\3\n"
LONGER = f"{CHAT}{BAD}{CHAT}"


def shared(*turns: dict[str, str]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


@dataclass(frozen=True)
class Case:
    """`prompt`: as every command reads it; `completion`, `pair`: if there are some; `unread`: named as not read."""

    row: Row
    prompt: str
    completion: str | None = None
    pair: tuple[str, str] | None = None
    label: bool | None = None
    steps: str | None = None
    unread: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


OPENR1 = {
    "problem": "2+2?", "solution": "It is 4.", "answer": "4", "problem_type": "Algebra", "generations": ["<think>", "x"],
    "messages": [USER, {"role": "assistant", "content": "<think>t</think>4"}],
}  # fmt: skip
ULTRA = {"prompt": "2+2?", "prompt_id": "7", "chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 9.0}
VERL = {
    "data_source": "gsm8k", "prompt": [USER], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"answer": "It is 4.", "split": "train"},
}  # fmt: skip
CASES = {
    "Alpaca": Case({"instruction": "Add.", "input": "2 2", "output": "4", "text": "Below is"}, "Add.\n\n2 2", "4",
        unread=("text",)),
    "Alpaca pairs": Case({"instruction": "Add.", "input": "2 2", "chosen": "4", "rejected": "5"}, "Add.\n\n2 2", "4", ("4", "5")),
    "Alpaca's columns as text": Case({"instruction": "Add.", "input": "2 2", "output": "4"}, "Add.", "4", unread=("input",),
        settings={"format": "columns"}),
    "Alpaca with a system": Case({"instruction": "2+2?", "input": "", "output": "4", "system": "Be kind."}, WITH_SYSTEM, GOOD),
    "LLaMA-Factory": Case({"instruction": "2+2?", "input": "", "output": "4", "system": "", "history": [["a", "b"]]}, "2+2?", "4",
        unread=("history",)),
    "Dolly": Case({"instruction": "Add.", "context": "2 2", "response": "4", "category": "qa"}, "Add.\n\n2 2", "4",
        unread=("category",)),
    "ShareGPT": Case({"id": "1", "conversations": shared(USER, YES)}, CHAT, GOOD, unread=("id",)),
    "ShareGPT with a system": Case({"system": "Be kind.", "conversations": shared(USER, YES)}, WITH_SYSTEM, GOOD),
    "ShareGPT pairs": Case({"conversations": shared(USER), "chosen": shared(YES)[0], "rejected": shared(NO)[0]}, CHAT, GOOD,
        (GOOD, BAD)),
    "OpenAI messages": Case({"messages": [SYSTEM, USER, YES]}, WITH_SYSTEM, GOOD),
    "OpenAI preferences": Case({"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]}, CHAT,
        GOOD, (GOOD, BAD),
        settings={"columns": {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}}),
    "Tulu": Case({"id": "1", "messages": [USER, YES], "source": "s"}, CHAT, GOOD, unread=("id", "source")),
    "UltraChat": Case({"prompt": "2+2?", "prompt_id": "7", "messages": [USER, YES]}, CHAT, GOOD, unread=("prompt", "prompt_id")),
    "UltraFeedback": Case(ULTRA, CHAT, GOOD, (GOOD, BAD), unread=("prompt", "prompt_id", "score_chosen")),
    "UltraFeedback with messages": Case(ULTRA | {"messages": [USER, YES]}, CHAT, GOOD, (GOOD, BAD),
        unread=("prompt", "prompt_id", "score_chosen")),
    "UltraFeedback by its prompt": Case(ULTRA, CHAT, GOOD, (GOOD, BAD), unread=("prompt_id", "score_chosen"),
        settings={"columns": {"prompt": "prompt"}}),
    "answers without the prompt": Case({"prompt": "2+2?", "chosen": [YES], "rejected": [NO]}, CHAT, GOOD, (GOOD, BAD)),
    "dpo-mix": Case({"dataset": "d", "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]}, WITH_SYSTEM, GOOD,
        (GOOD, BAD), unread=("dataset",)),
    "orca-dpo": Case({"system": "Be kind.", "question": "2+2?", "chosen": "4", "rejected": "5"}, WITH_SYSTEM, GOOD, (GOOD, BAD)),
    "orca-dpo without its system": Case({"system": "Be kind.", "question": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "4",
        ("4", "5"), unread=("system",), settings={"format": "columns"}),
    "OpenOrca": Case({"id": "1", "system_prompt": "Be kind.", "question": "2+2?", "response": "4"}, WITH_SYSTEM, GOOD,
        unread=("id",)),
    "HH": Case({"chosen": f"{HH} 4", "rejected": f"{HH} 5"}, HH, " 4", (" 4", " 5")),
    "HH with a prompt": Case({"prompt": HH, "chosen": f"{HH} 4", "rejected": f"{HH} 5"}, HH, " 4", (" 4", " 5")),
    "OpenR1-Math": Case(OPENR1, CHAT, "<think>t</think>4\3\n",
        unread=("problem", "solution", "answer", "problem_type", "generations")),
    "NuminaMath": Case({"source": "s", "problem": "2+2?", "solution": "It is 4.", "messages": [USER, YES]}, CHAT, GOOD,
        unread=("source", "problem", "solution")),
    "MATH": Case({"problem": "2+2?", "level": "Level 1", "type": "Algebra", "solution": "It is 4."}, "2+2?", "It is 4.",
        unread=("level", "type")),
    "MATH-500": Case({"problem": "2+2?", "solution": "It is 4.", "answer": "4", "level": 1}, "2+2?", "It is 4.",
        unread=("answer", "level")),
    "GSM8K": Case({"question": "2+2?", "answer": "2+2=4\n#### 4"}, "2+2?", "2+2=4\n#### 4"),
    "HelpSteer": Case({"prompt": "2+2?", "response": "4", "helpfulness": 4, "verbosity": 2}, "2+2?", "4",
        unread=("helpfulness", "verbosity")),
    "KTO": Case({"prompt": "2+2?", "completion": "4", "label": True}, "2+2?", "4", label=True),
    "KTO of messages": Case({"prompt": [USER], "completion": [YES], "label": False}, CHAT, GOOD, label=False),
    "Math-Shepherd, as TRL has it": Case({"prompt": "2+2?", "completions": ["two", "four"], "labels": [True, False]}, "2+2?",
        steps="two\nfour"),
    "steps of messages": Case({"prompt": [USER], "completions": ["two", "four"], "labels": [True, False]}, CHAT,
        steps="two\nfour\3\n"),
    "verl": Case(VERL, CHAT, "It is 4.\3\n", settings={"columns": {"completion": "extra_info.answer"}},
        unread=("data_source", "ability", "reward_model")),
    "DAPO-17k": Case({name: VERL[name] for name in ("data_source", "prompt", "reward_model")}, CHAT),
    "PRM800K": Case({"question": {"problem": "2+2?"}, "label": {}}, "2+2?", settings={"columns": {"prompt": "question.problem"}}),
    "TRL's conversations": Case({"prompt": [SYSTEM, USER], "completion": [YES]}, WITH_SYSTEM, GOOD),
    "one message": Case({"prompt": USER}, CHAT),
    "content in parts": Case({"prompt": [{**USER, "content": [{"type": "text", "text": "2+"}, {"text": "2?"}]}]}, CHAT),
    "a text and a message": Case({"prompt": "2+2?", "completion": [YES]}, CHAT, GOOD),
    "a message and a text": Case({"prompt": [USER], "response": "4"}, CHAT, GOOD),
    "messages of each answer": Case({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, CHAT, GOOD, (GOOD, BAD)),
    "pairs of longer dialogues": Case({"chosen": [USER, NO, USER, YES], "rejected": [USER, NO, USER, NO]}, LONGER, GOOD,
        (GOOD, BAD)),
    "ShareGPT pairs of longer dialogues": Case({"conversations": shared(USER, NO, USER), "chosen": shared(YES)[0],
        "rejected": shared(NO)[0]}, LONGER, GOOD, (GOOD, BAD)),
    "ShareGPT's whole dialogues": Case({"chosen": shared(USER, NO, USER, YES), "rejected": shared(USER, NO, USER, NO)}, LONGER,
        GOOD, (GOOD, BAD)),
    "a null column of the schema": Case({"prompt": "2+2?", "completion": None, "messages": None, "response": "4"}, "2+2?", "4"),
}  # fmt: skip


def readings(row: Row, tmp_path: Path, settings: dict[str, Any]) -> dict[str, tuple[Any, Quarantine]]:
    """Example of each command, or why there is none, and what was told."""
    path, tokenizer, found = write_rows(tmp_path, row), CharacterTokenizer(), {}
    readers: dict[str, Any] = {
        "train": read_prompts, "sft": read_completions, "rm": read_pairs,
        "kto": lambda *given: [each for each, _ in read_marked(*given)],
        "prm": lambda *given: [each for each, _ in read_steps(*given, "\n")],
    }  # fmt: skip
    for name, reader in readers.items():
        problems = RowProblems(Quarantine())
        try:
            (example, *_) = reader(DataConfig(path=path, **settings), tokenizer, problems) or [None]
            problems.raise_errors()
            found[name] = example, problems.quarantine
        except (DataError, ConfigError) as error:
            found[name] = error, problems.quarantine
    return found


def example_of(found: Any) -> Any:
    assert not isinstance(found, Exception), found
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_command_reads_the_same(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    found = readings(case.row, tmp_path, case.settings)
    read = {command: example.prompt for command, (example, _) in found.items() if not isinstance(example, Exception)}
    assert set(read.values()) == {case.prompt} and "train" in read
    expected = {
        "sft": None if case.completion is None else (case.completion,), "rm": case.pair,
        "kto": (case.completion,) if case.label is not None else case.pair and case.pair[:1],
        "prm": None if case.steps is None else (case.steps,),
    }  # fmt: skip
    assert {command: answers for command, answers in expected.items() if answers} == {
        command: example_of(found[command][0]).answers for command in read if command != "train"
    }
    told = found["rm" if case.pair else "prm" if case.steps else "sft" if case.label is None else "kto"][1]
    if case.completion or case.steps:
        assert told.notes[-1].partition("; not read: ")[2] == ", ".join(map(repr, case.unread)), told.notes
    if "columns" not in case.settings and "format" not in case.settings:
        (asked,) = prompts_of_file(tmp_path / "rows.jsonl", None, Wording(), CharacterTokenizer())  # type: ignore[arg-type]
        assert asked.text == case.prompt, "as `oppo generate` and `oppo eval` ask"
        (asked,) = prompts_of_file(tmp_path / "rows.jsonl", None, Wording(as_chat=True), CharacterTokenizer())  # type: ignore[arg-type]
        assert asked.text.count("<user>") == max(1, case.prompt.count("<user>")), "put into the template once"


@pytest.mark.parametrize(("row", "settings", "completion"), [
    (OPENR1, {"format": "messages"}, "<think>t</think>4\3\n"), (OPENR1, {"format": "columns"}, "It is 4."),
    (OPENR1, {"columns": {"completion": "answer"}}, "4\3\n"), (OPENR1, {"columns": {"prompt": "problem"}}, "It is 4."),
    (OPENR1, {"columns": {"prompt": "problem", "completion": "answer"}}, "4"),
    *[({"messages": [USER, YES], name: "x"}, {}, GOOD) for name in ("response", "output", "completion", "solution")],
    ({"messages": [USER], "answer": "4"}, {}, GOOD),
    ({"prompt": [USER, YES], "completion": "5"}, {"columns": {"completion": "completion"}}, BAD),
    ({"prompt": [USER, YES], "completion": "5"}, {"format": "messages"}, GOOD),
    ({"question": "2+2?", "answer": "4", "messages": [USER, NO]}, {"format": "columns"}, "4"),
    ({"question": "2+2?", "answer": "4"}, {"format": "messages", "columns": {"prompt": "question"}}, GOOD),
    ({"question": "q", "context": "c", "answer": "4"}, {"format": "alpaca", "columns": {"prompt": "question"}}, "4"),
])  # fmt: skip
def test_what_is_set_wins(tmp_path: Path, row: Row, settings: dict[str, Any], completion: str) -> None:
    found = readings(row, tmp_path, settings)
    assert example_of(found["sft"][0]).answers == (completion,)
    assert example_of(found["sft"][0]).prompt == example_of(found["train"][0]).prompt


@pytest.mark.parametrize(("row", "both", "remedies"), [
    ({"prompt": "p", "response": "a", "output": "b"}, "completion may be response or output",
        [{"columns": {"completion": "response"}}, {"columns": {"completion": "output"}}]),
    ({"prompt": "p", "completion": "a", "chosen": "b", "rejected": "c"}, "completion may be completion or chosen",
        [{"columns": {"completion": "chosen"}}]),
    ({"question": "q", "instruction": "i", "output": "b"}, "prompt may be question or instruction",
        [{"columns": {"prompt": "instruction"}}, {"columns": {"prompt": "question"}}, {"format": "alpaca"}]),
    ({"messages": [USER], "conversations": shared(SYSTEM, USER), "answer": "4"}, "prompt may be messages or conversations",
        [{"columns": {"prompt": "messages"}}, {"columns": {"prompt": "conversations"}}]),
    ({"prompt": [USER, YES], "completion": "5"}, "answer may be completion or the last turn of prompt",
        [{"columns": {"completion": "completion"}}, {"format": "messages"}]),
])  # fmt: skip
def test_two_readings_are_refused_with_the_setting_that_chooses(tmp_path: Path, row: Row, both: str, remedies: Any) -> None:
    refusal = readings(row, tmp_path, {})["sft"][0]
    assert isinstance(refusal, DataError) and both in str(refusal) and "; set data." in str(refusal)
    assert all(example_of(readings(row, tmp_path, settings)["sft"][0]).answers for settings in remedies)


@pytest.mark.parametrize(("row", "command", "says"), [
    ({"history": "h", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}, "rm", "'human_ref_A' and 'human_ref_B'"),
    ({"prompt": "p", "response_0": "a", "response_1": "b", "safer": 1}, "rm", "'response_0' and 'response_1'"),
    (VERL, "sft", "nearest is 'extra_info.answer': set data.columns.completion=extra_info.answer"),
    ({"prompt": "x"}, "sft", "no column for the completion"),
    ({"prompt": "p", "answers": ["a", "b"]}, "sft", r"it has: prompt, answers\. None of them"),
    ({"question": "p", "generated_solution": "a"}, "sft", "set data.columns.completion=generated_solution"),
    ({"Problem": "p", "Solution": "s", "Answer": 4}, "train", "set data.columns.prompt=Problem"),
    ({"input": "p", "system": "s", "chosen": "a", "rejected": "b"}, "rm", "column for the prompt .* Set data.columns.prompt"),
    ({"prompt": "p", "completions": [{"model": "m"}]}, "sft", "None of them can be it: add one"),
    ({"question": {"problem": "p", "steps": ["s"]}}, "train", r"name the key that holds the text, such as question\.problem"),
    ({"messages": [USER, YES, USER]}, "sft", "it has: messages"),
    ({"conversations": [USER, {**NO, "weight": 0}]}, "sft", "marks the assistant's turn as not to be learned"),
    ({"messages": [USER, {**NO, "train": False}]}, "sft", "marks the assistant's turn as not to be learned"),
    ({"prompt": "p", "chosen": [{**USER, "content": "other"}, YES], "rejected": [NO]}, "rm", "neither repeat"),
])  # fmt: skip
def test_a_layout_that_is_not_read_is_refused_with_a_remedy_that_works(tmp_path: Path, row: Row, command: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        raise readings(row, tmp_path, {})[command][0]


def test_marked_turns_are_not_learned_and_prompts_of_both_kinds_told_with_the_setting_that_makes_them_one(tmp_path: Path) -> None:
    row = {"messages": [USER, {**NO, "weight": 0}, USER, {**YES, "weight": 1}]}
    example = example_of(readings(row, tmp_path, {"turns": "all"})["sft"][0])
    assert example.answers == (GOOD,) and BAD in example.prompt
    _, told = readings({"query": "p", "response": "a", "tools": "[{}]"}, tmp_path, {})["sft"]
    assert told.notes[-1].endswith("; not read: 'tools'")
    path = write_rows(tmp_path, *({"prompt": prompt, "completion": "4"} for prompt in ("2+2?", [USER])))
    for settings, both in (({}, True), ({"format": "messages", "columns": {"prompt": "prompt"}}, False)):
        problems = RowProblems(Quarantine())
        examples = read_completions(DataConfig(path=path, **settings), CharacterTokenizer(), problems)
        assert (examples[0].prompt != examples[1].prompt) == both
        assert any("1 of 2 prompts are chat messages" in note for note in problems.quarantine.notes) == both


def test_the_expected_answer_within_an_object() -> None:
    assert column(VERL, "answer") == column(VERL, "reward_model.ground_truth") == "4"
    assert column(VERL | {"answer": "5"}, "answer") == "5" and column({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    with pytest.raises(RewardError, match=r"it has: x, meta\.truth\).*"):
        column({"x": 1, "meta": {"truth": 2}}, "answer")
    with pytest.raises(RewardError, match=r"the nearest is `answer: extra_info\.answer`"):
        column({"extra_info": {"answer": 2}}, "answer")


@pytest.mark.parametrize("rule", ["gsm8k", "math", "multiple_choice"])
def test_an_answer_of_any_type_is_read_or_its_row_is_set_aside(tmp_path: Path, rule: Any) -> None:
    answers = [10**400, 4, True, None, [1], {"a": 1}, 1e300, -5, "x", "", "4", "B", 0.5, [[[]]], "9" * 5000]
    path = write_rows(tmp_path, *({"question": "2+2?", "answer": answer} for answer in answers))
    rewards, quarantine = build_reward_functions([RewardPart(kind="verifier", name=rule)]), Quarantine()
    config = PromptDataConfig(path=path, bad_rows="quarantine")
    prompts = load_prompts(config, CharacterTokenizer(), quarantine=quarantine, check=rewards.check)
    rewards.close()
    used = [answers[row.row] for row in prompts.rows]
    assert len(used) + len(quarantine) == len(answers) and 4 in used
    assert not any(value in used for value in (None, [1], {"a": 1}, "")) and all(value is not True for value in used)
    assert all(len(entry["reason"]) < 600 for entry in quarantine.entries)
