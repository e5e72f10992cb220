"""Tokenizers: round trips for any text, clear refusals, and files that load again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece
from oppo_megatron.errors import ConfigError, DataError
from tests.support.tokenizers import save_byte_level

TEXTS = [f"Q: {a}+{b}=?\nA: the sum  is {a + b}\n\n#### {a + b} caf\u00e9 \u2581" for a in range(30) for b in range(30)]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module", params=["bpe", "unigram", "char"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / f"{request.param}.model"
    vocab_size = {"bpe": 300, "unigram": 290, "char": 282}[request.param]
    train_sentencepiece(TEXTS, path, vocab_size, model_type=request.param, character_coverage=1.0)
    return load_tokenizer(TokenizerConfig(path=path))


@pytest.fixture
def hugging_face_directory(tmp_path: Path) -> Path:
    return save_byte_level(tmp_path / "hf", ["a"], 258)


hard_texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["\n", "  ", "\u2581", "\0", "<s>", "</s>", "<unk>", "<0x0A>", "\r\n", "\t", "12", "\u2047", "####", "\u2585"]
        ),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=hard_texts)
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(4 <= i < trained.vocab_size for i in ids), "no text makes a special token"


def test_special_ids_and_single_digits(trained: Tokenizer) -> None:
    assert (trained.bos_id, trained.eos_id) == (1, 2)
    assert trained.decode([1, 2, 3]) == ""
    assert len(trained.encode("12345")) == 5
    (newline,) = trained.encode("\n")
    assert trained.encode("1\n\n2").count(newline) == 2


def test_saved_files_load_again(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "saved")
    trained_again = load_tokenizer(TokenizerConfig(path=tmp_path / "saved"))
    trained_again.save(tmp_path / "saved")
    assert isinstance(trained_again, SentencePieceTokenizer)
    assert all(trained_again.encode(text) == trained.encode(text) for text in TEXTS[:20])
    assert trained_again.vocab_size == trained.vocab_size


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "char"])
def test_a_vocabulary_that_does_not_fit_names_the_one_that_does(tmp_path: Path, model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=9999 is too large.*the largest is (\d+)") as caught:
        train_sentencepiece(["ab abc abcd 12"] * 9, tmp_path / "t.model", 9999, model_type=model_type)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    largest = int(str(caught.value).rsplit(" ", 1)[1])
    train_sentencepiece(["ab abc abcd 12"] * 9, tmp_path / "t.model", largest, model_type=model_type)
    assert load_tokenizer(TokenizerConfig(path=tmp_path / "t.model")).vocab_size == largest


def test_training_refuses_too_small_and_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=100 is too small.* need 26[0-9]"):
        train_sentencepiece(["a"], tmp_path / "t.model", 100)
    with pytest.raises(DataError, match="at least one text"):
        train_sentencepiece(["", " \n"], tmp_path / "t.model", 300)


def test_training_is_quiet_and_repeatable(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        train_sentencepiece(TEXTS, tmp_path / f"{name}.model", 300)
    assert capfd.readouterr() == ("", "")
    one, two = (load_tokenizer(TokenizerConfig(path=tmp_path / f"{name}.model")) for name in ("a", "b"))
    assert [one.encode(text) for text in TEXTS] == [two.encode(text) for text in TEXTS]


def test_sentencepiece_chat(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    train_sentencepiece(TEXTS, path, 300)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="tokenizer.chat_template"):
        load_tokenizer(TokenizerConfig(path=path)).chat.render(messages)
    chat = load_tokenizer(TokenizerConfig(path=path, chat_template=TEMPLATE))
    assert chat.chat.render(messages) == "[user]hi\n[assistant]"
    assert chat.chat.render(messages, generation_prompt=False) == "[user]hi\n"
    with pytest.raises(DataError, match="no tools"):
        chat.chat.render([{"role": "tool", "content": "x"}])


def test_paths_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist.*oppo tokenizer"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "none"))
    (tmp_path / "t.model").write_text("not a model")
    with pytest.raises(ConfigError, match="not a sentencepiece model"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "t.model"))
    with pytest.raises(ConfigError, match="not a tokenizer that transformers can load"):
        load_tokenizer(TokenizerConfig(path=tmp_path))


def test_sentencepiece_without_eos(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "t"), vocab_size=40, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ConfigError, match="no EOS"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "t.model"))


def test_hugging_face_directory(hugging_face_directory: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(path=hugging_face_directory, chat_template=TEMPLATE))
    text = "Hi  there\n caf\u00e9"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert tokenizer.vocab_size == 258, "256 bytes, EOS and the added token"
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_id] and tokenizer.bos_id is None
    assert tokenizer.chat.render([{"role": "user", "content": "x"}]) == "[user]x\n[assistant]"
    with pytest.raises(DataError, match="no tools"):
        tokenizer.chat.render([{"role": "tool", "content": "x"}])
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(TokenizerConfig(path=tmp_path / "again")).encode(text) == ids


def test_hugging_face_without_template_or_eos(hugging_face_directory: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(path=hugging_face_directory))
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.chat.render([{"role": "user", "content": "x"}])
    settings_file = hugging_face_directory / "tokenizer_config.json"
    values = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({name: value for name, value in values.items() if name != "eos_token"}))
    with pytest.raises(ConfigError, match="no eos_token"):
        load_tokenizer(TokenizerConfig(path=hugging_face_directory))


def test_a_tokenizer_has_its_own_first_then_its_directory_s_then_the_policy_s(
    hugging_face_directory: Path, tmp_path: Path
) -> None:
    own = load_tokenizer(TokenizerConfig(path=hugging_face_directory))
    assert own.eos_ids == (own.eos_id,)
    (hugging_face_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own.eos_id]}))
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    tokenizer = load_tokenizer(TokenizerConfig(path=hugging_face_directory), policy)
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (own.eos_id, (own.eos_id, 7, 9))
    assert load_tokenizer(TokenizerConfig(path=hugging_face_directory), None).eos_ids == (own.eos_id, 7)
