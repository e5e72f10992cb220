"""Mistakes with rows and columns: each ends in one message with the value, the rule and a remedy, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig, TokenizerConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import load_tokenizer, train_sentencepiece
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.rewards.functions import build_reward_functions
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def load(kind: str, path: Path | list[Path], **settings: Any) -> Any:
    tokenizer, aside = CharacterTokenizer(), Quarantine()
    if kind == "train":
        return load_prompts(PromptDataConfig(path=path, **settings), tokenizer, quarantine=aside)
    config = DataConfig(path=path, **settings)
    loader = RowLoader(config, tokenizer, 1000, aside)
    if kind == "prm":
        return loader.steps("\n")
    return loader.completions() if kind == "sft" else loader.pairs()


MISTAKES: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "no prompt column": ("train", [{"text": "a"}], {}, "no column for the prompt .*it has: text. .*data.columns.prompt"),
    "no rejected": ("rm", [{"prompt": "a", "chosen": "b"}], {}, "no column for the rejected .*it has: prompt, chosen"),
    "rows under a key": ("train", [{"data": [{"prompt": "a"}, {"prompt": "b"}]}], {}, r"jq \.data .*rows\.json"),
    "nothing but empty prompts": ("train", [{"prompt": ""}], {}, r"column 'prompt' is empty\nCorrect them\.$"),
    "an unknown speaker": ("train", [{"conversations": [{"from": "robot", "value": "a"}]}], {}, "from 'robot'; known are human"),
    "a number as Alpaca's input": (
        "sft", [{"instruction": "a", "input": "x", "output": "b"}, {"instruction": "a", "input": 5, "output": "b"}], {},
        "rows.jsonl:2: column 'input' is not text, but int"),
    "text against messages": ("rm", [{"chosen": "a", "rejected": [USER, REPLY]}], {}, "one is text and the other a list"),
    "pairs with nothing in common": (
        "rm", [{"chosen": [USER, REPLY], "rejected": [REPLY, USER]}], {}, "have no beginning in common"),
    "steps without a separator": (
        "rm", [{"prompt": "a", "completions": ["b"], "labels": [1]}], {}, "no column for the chosen .*set separator, as in"),
    "judged completions for pairs": ("rm", [{"prompt": "a", "completion": "b", "label": 1}], {}, "set dpo.loss=kto"),
    "no labels": ("prm", [{"prompt": "a", "completions": ["b"]}], {}, "no column for the labels .*it has: prompt, completions"),
    "a text as steps": ("prm", [{"prompt": "a", "completions": "b", "labels": [1]}], {}, "not a list with an item per step"),
    "a number as a step": ("prm", [{"prompt": "a", "completions": ["b", 3], "labels": [1, 0]}], {}, "step 2 .* but int"),
    "an empty step": ("prm", [{"prompt": "a", "completions": ["b", " "], "labels": [1, 0]}], {}, "step 2 .* is empty"),
    "more labels than steps": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [1, 0]}], {}, "1 steps .* but 2 labels"),
    "a label beyond 1": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [-1]}], {}, "label 1 .* is -1, but must be"),
    "a word as label": ("prm", [{"prompt": "a", "completions": ["b"], "labels": ["+"]}], {}, "label 1 .* is '[+]', but must be"),
    "no label at all": ("prm", [{"prompt": "a", "completions": ["b"], "labels": [None]}], {}, "no label that is not null"),
    "two lines in a step": (
        "prm", [{"prompt": "a", "completions": ["b\nc", "d"], "labels": [1, 0]}], {},
        "the text has 3 steps by the separator '.n', but the row has 2: .* bad_rows=quarantine|Correct them"),
    "a long prompt": ("train", [{"prompt": "a" * 9}], {"max_prompt_tokens": 5}, "9 tokens, more than data.max_prompt_tokens=5"),
    "a long row": ("sft", [{"prompt": "a" * 1000, "completion": "b"}], {}, "have 1002 tokens, more than max_tokens=1000"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_rows(tmp_path: Path, mistake: str) -> None:
    kind, rows, settings, says = MISTAKES[mistake]
    path = write_rows(tmp_path, *rows)
    with pytest.raises((DataError, ConfigError), match=f"(?s){says}") as caught:
        load(kind, path, **settings)
    assert str(caught.value).count("rows.jsonl") <= 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent.jsonl", "does not exist"),
        ("rows.json", "did you mean `.*rows.jsonl`"),
        ("nowhere/*.jsonl", "is a pattern that no file matches"),
        ("empty", "no file in it ends with"),
    ],
)
def test_a_mistake_with_paths(tmp_path: Path, name: str, says: str) -> None:
    write_rows(tmp_path, {"prompt": "a"})
    (tmp_path / "empty").mkdir()
    with pytest.raises((DataError, ConfigError), match=says):
        load("train", tmp_path / name)


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
    "not Jinja": ("{% for m in messages %}{{ m.content }", r"tokenizer.chat_template, line 1: not a Jinja template .*correct"),
    "no filter of this name": ("{{ messages | shout }}", "No filter named 'shout'"),
    "a mistake of types": ("{{ messages[0]['content'] + 1 }}", "refuses the messages: TypeError: .*set tokenizer.chat_template"),
    "a division": ("{{ 1 / 0 }}", "refuses the messages: ZeroDivisionError"),
    "a part that is not there": ("{{ messages[0].tools.name }}", "refuses the messages: .*has no attribute 'tools'"),
    "messages that it refuses": ("{{ raise_exception('no users') }}", "refuses the messages: no users; correct them, or set"),
}


@pytest.mark.parametrize("hugging_face", [False, True], ids=["sentencepiece", "transformers"])
@pytest.mark.parametrize("mistake", TEMPLATES)
def test_a_broken_chat_template_is_said_once(tmp_path: Path, mistake: str, hugging_face: bool) -> None:
    template, says = TEMPLATES[mistake]
    if hugging_face:
        save_byte_level(tmp_path / "tokenizer", ["hello there"], eos_token="<|end|>")
    else:
        (tmp_path / "tokenizer").mkdir()
        train_sentencepiece(["hello there"] * 9, tmp_path / "tokenizer" / "tokenizer.model", 275)
    path = write_rows(tmp_path, *[{"messages": [USER]}] * 30)
    with pytest.raises((DataError, ConfigError), match=says) as caught:
        tokenizer = load_tokenizer(TokenizerConfig(path=tmp_path / "tokenizer", chat_template=template))
        load_prompts(PromptDataConfig(path=path), tokenizer, quarantine=Quarantine())
    assert len(str(caught.value).splitlines()) <= 3
