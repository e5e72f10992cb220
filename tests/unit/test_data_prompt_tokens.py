"""BOS before a prompt: as the tokenizer has it itself, or as told, and never twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig, PromptDataConfig, TokenizerConfig
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import encode_prompt, load_tokenizer, train_sentencepiece
from oppo_megatron.errors import ConfigError
from tests.support.rows import write_rows
from tests.support.tokenizers import save_byte_level

BEGIN = "<|begin|>"
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.processors import TemplateProcessing

    path = save_byte_level(tmp_path_factory.mktemp("bos"), ["one two three"], bos_token=BEGIN)
    fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, fast.token_to_id(BEGIN))])
    fast.save(str(path / "tokenizer.json"))
    return path


def first_tokens(path: Path, config: TokenizerConfig, **data: Any) -> tuple[list[int], int | None]:
    tokenizer = load_tokenizer(config)
    prompts = load_prompts(PromptDataConfig(path=path, **data), tokenizer, quarantine=Quarantine())
    return list(prompts.rows[0].tokens), tokenizer.bos_id


@pytest.mark.parametrize(("add_bos", "number"), [(None, 1), (True, 1), (False, 0)])
@pytest.mark.parametrize("text", ["one two", f"{BEGIN}one two"])
def test_a_plain_prompt_begins_as_its_tokenizer_begins(
    directory: Path, tmp_path: Path, add_bos: bool | None, number: int, text: str
) -> None:
    path = write_rows(tmp_path, {"prompt": text})
    tokens, bos = first_tokens(path, TokenizerConfig(path=directory, add_bos=add_bos))
    assert tokens.count(bos) == (1 if text.startswith(BEGIN) else number)
    assert (tokens[0] == bos) == (bos in tokens)


def test_a_template_that_has_it_gets_no_second(directory: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"messages": [{"role": "user", "content": "one"}]})
    tokens, bos = first_tokens(path, TokenizerConfig(path=directory, chat_template=CHAT))
    assert tokens[0] == bos and tokens.count(bos) == 1


@pytest.mark.parametrize("add_bos", [None, False], ids=["by the tokenizer", "by its template"])
def test_a_prompt_that_is_cut_keeps_it(directory: Path, tmp_path: Path, add_bos: bool | None) -> None:
    plain = {"prompt": "one two three", "completion": "four"}
    path = write_rows(tmp_path, plain if add_bos is None else {"messages": [{"role": "user", "content": "one two three"}]})
    config = TokenizerConfig(path=directory, add_bos=add_bos, chat_template=CHAT)
    whole, bos = first_tokens(path, config)
    cut, _ = first_tokens(path, config, max_prompt_tokens=3, long_rows="truncate")
    assert cut == [bos, *whole[-2:]] and len(whole) > 3


def test_answers_to_learn_from_follow_it(directory: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "one", "completion": "two"})
    tokenizer = load_tokenizer(TokenizerConfig(path=directory))
    (row,) = RowLoader(DataConfig(path=path), tokenizer, 64, Quarantine()).completions()
    assert row.prompt[0] == tokenizer.bos_id and tokenizer.bos_id not in row.completion


def test_a_sentencepiece_model_adds_none_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    train_sentencepiece(["one two three"], path, 270)
    plain, told = (load_tokenizer(TokenizerConfig(path=path, add_bos=add)) for add in (None, True))
    assert encode_prompt(told, "one") == [told.bos_id, *encode_prompt(plain, "one")]
    assert encode_prompt(told, "") == [], "a prompt of no text is still none"


def test_without_a_bos_there_is_none_to_add(tmp_path: Path) -> None:
    save_byte_level(tmp_path, ["one two three"])
    assert not load_tokenizer(TokenizerConfig(path=tmp_path)).adds_bos
    with pytest.raises(ConfigError, match="tokenizer.add_bos is true, but the tokenizer .* has no BOS token"):
        load_tokenizer(TokenizerConfig(path=tmp_path, add_bos=True))
