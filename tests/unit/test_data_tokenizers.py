"""Tokenizers: round trips, refusals, BOS before a prompt, and the ends of steps in a response."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.data import DataConfig, PromptDataConfig, TokenizerConfig
from oppo_megatron.data.prompts import load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import RowLoader
from oppo_megatron.data.tokenizer import SentencePieceTokenizer, Tokenizer, encode_prompt, load_tokenizer, train_sentencepiece
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.token_text import StepEnds
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

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
def hugging_face(tmp_path: Path) -> Path:
    return save_byte_level(tmp_path / "hf", ["a"], 258)


PIECES = ("\n", "  ", "\u2581", "\0", "<s>", "</s>", "<unk>", "<0x0A>", "\r\n", "\t", "12", "\u2047", "####", "\u2585")


@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.text(max_size=12) | st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(4 <= i < trained.vocab_size for i in ids), "no text makes a special token"


def test_special_ids_single_digits_and_files_that_load_again(trained: Tokenizer, tmp_path: Path) -> None:
    assert (trained.bos_id, trained.eos_id) == (1, 2) and trained.decode([1, 2, 3]) == ""
    assert len(trained.encode("12345")) == 5
    (newline,) = trained.encode("\n")
    assert trained.encode("1\n\n2").count(newline) == 2
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


def test_training_is_quiet_and_repeatable_and_refuses_too_little(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="vocab_size=100 is too small.* need 26[0-9]"):
        train_sentencepiece(["a"], tmp_path / "t.model", 100)
    with pytest.raises(DataError, match="at least one text"):
        train_sentencepiece(["", " \n"], tmp_path / "t.model", 300)
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
    with pytest.raises(ConfigError, match="does not exist.*oppo data tokenizer"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "none"))
    (tmp_path / "t.model").write_text("not a model")
    with pytest.raises(ConfigError, match="not a sentencepiece model"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "t.model"))
    with pytest.raises(ConfigError, match="not a tokenizer that transformers can load"):
        load_tokenizer(TokenizerConfig(path=tmp_path))
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "t"), vocab_size=40, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ConfigError, match="no EOS"):
        load_tokenizer(TokenizerConfig(path=tmp_path / "t.model"))


def test_hugging_face_folder(hugging_face: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(path=hugging_face, chat_template=TEMPLATE))
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
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(TokenizerConfig(path=hugging_face)).chat.render([{"role": "user", "content": "x"}])
    settings_file = hugging_face / "tokenizer_config.json"
    values = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({name: value for name, value in values.items() if name != "eos_token"}))
    with pytest.raises(ConfigError, match="no eos_token"):
        load_tokenizer(TokenizerConfig(path=hugging_face))


def test_a_tokenizer_has_its_own_first_then_its_directory_s_and_the_policy_s(hugging_face: Path, tmp_path: Path) -> None:
    own = load_tokenizer(TokenizerConfig(path=hugging_face))
    assert own.eos_ids == (own.eos_id,)
    (hugging_face / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, own.eos_id]}))
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    tokenizer = load_tokenizer(TokenizerConfig(path=hugging_face), policy)
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (own.eos_id, (own.eos_id, 7, 9))
    assert load_tokenizer(TokenizerConfig(path=hugging_face), None).eos_ids == (own.eos_id, 7)


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


@pytest.mark.parametrize("text", ["one two", f"{BEGIN}one two"])
def test_a_prompt_begins_as_its_tokenizer_begins(directory: Path, tmp_path: Path, text: str) -> None:
    path = write_rows(tmp_path, {"prompt": text})
    for add_bos in (None, True, False):
        tokens, bos = first_tokens(path, TokenizerConfig(path=directory, add_bos=add_bos))
        assert tokens.count(bos) == (text.startswith(BEGIN) or add_bos is not False)
        assert (tokens[0] == bos) == (bos in tokens)
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
    path = write_rows(tmp_path, {"prompt": "one", "completion": "two"})
    tokenizer = load_tokenizer(TokenizerConfig(path=directory))
    (row,) = RowLoader(DataConfig(path=path), tokenizer, 64, Quarantine()).completions()
    assert row.prompt[0] == tokenizer.bos_id and tokenizer.bos_id not in row.completion, "the answer follows it"


def test_a_sentencepiece_model_adds_none_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    train_sentencepiece(["one two three"], path, 270)
    plain, told = (load_tokenizer(TokenizerConfig(path=path, add_bos=add)) for add in (None, True))
    assert encode_prompt(told, "one") == [told.bos_id, *encode_prompt(plain, "one")]
    assert encode_prompt(told, "") == [], "a prompt of no text is still none"
    save_byte_level(tmp_path, ["one two three"])
    assert not load_tokenizer(TokenizerConfig(path=tmp_path)).adds_bos
    with pytest.raises(ConfigError, match="tokenizer.add_bos is true, but the tokenizer .* has no BOS token"):
        load_tokenizer(TokenizerConfig(path=tmp_path, add_bos=True))


STEP_TEXTS = [
    f"Step {a}: so {a} plus {b}.\n\nStep {b}: the sum  is {a + b}.\ncaf\u00e9 \u65e5\u672c \u043a\u0438\nA: {a + b}\n"
    for a in range(30) for b in range(30)
]  # fmt: skip
SEPARATORS = ["\n", "\n\n", ".\n", " \u043a\u0438\n", "\u65e5", "Step ", "  ", "is 1", "\n\nStep"]


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte-level", "over words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Sentencepiece with a newline of its own; byte-level BPE, also such that ".\\n\\nStep " is one token."""
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    if request.param in ("byte-level", "over words"):
        over_words = request.param == "over words"
        made = load_tokenizer(TokenizerConfig(path=save_byte_level(path.parent, STEP_TEXTS, over_words=over_words)))
        assert len(made.encode(".\n\nStep ")) == (1 if over_words else 5)
        return made
    train_sentencepiece(STEP_TEXTS, path, 293, model_type=request.param, character_coverage=0.98)
    return load_tokenizer(TokenizerConfig(path=path))


def plain_ends(tokenizer: Tokenizer, separator: str, response: list[int]) -> list[int]:
    """Decode everything up to each token."""
    ends, begun = [], 0
    for place in range(len(response)):
        *steps, after = tokenizer.decode(response[: place + 1])[begun:].split(separator)
        if any(step.strip() for step in steps):
            ends.append(place)
            begun = len(tokenizer.decode(response[: place + 1])) - len(after)
    left = tokenizer.decode(response)[begun:].replace(separator, "").strip()
    last = len(response) - 1
    return ends if ends and (ends[-1] == last or not left) else [*ends, last]


def pieces(draws: random.Random, size: int) -> Iterator[str]:
    while size > 0:
        text = draws.choice(STEP_TEXTS)
        start = draws.randrange(len(text))
        piece = text[start : start + draws.randrange(1, 12)]
        size -= len(piece)
        yield piece


def test_a_step_ends_with_the_token_that_completes_the_separator(tokenizer: Tokenizer) -> None:
    draws, found, several = random.Random(5), 0, 0
    for _ in range(400):
        separator, texts = draws.choice(SEPARATORS), list(pieces(draws, draws.choice([3, 60, 120])))
        apart = [token for text in texts for token in tokenizer.encode(text)]
        response = draws.choice([apart, tokenizer.encode("".join(texts))])
        if draws.random() < 0.5:
            response = [*response, tokenizer.eos_id]
        ends = StepEnds(separator, tokenizer.decode).of(response)
        assert ends == plain_ends(tokenizer, separator, response), (separator, response)
        assert ends == sorted(set(ends)) and 0 <= ends[0] and ends[-1] < len(response)
        found += len(ends) > 1
        several += len(ends) > 5
    assert found > 50 and several > 10
    for _ in range(200):  # ids of any kind have ends, too
        response = draws.choices(range(tokenizer.vocab_size + 3), k=draws.randrange(1, 40))
        ends = StepEnds(draws.choice(SEPARATORS), tokenizer.decode).of(response)
        assert ends and ends == sorted(set(ends)) and ends[-1] < len(response)


def test_a_longer_response_keeps_the_ends_that_it_had(tokenizer: Tokenizer) -> None:
    """The last end may move, where the response was cut: so labels and scores of a prefix are at the same tokens."""
    draws = random.Random(7)
    for _ in range(60):
        response = tokenizer.encode("".join(pieces(draws, 120)))
        step_ends = StepEnds(draws.choice(SEPARATORS), tokenizer.decode)
        whole, cut = step_ends.of(response), draws.randrange(1, len(response) + 1)
        before = [end for end in whole if end < cut]
        assert step_ends.of(response[:cut])[: len(before)] == before


@pytest.mark.parametrize("separator, text, ends", [
    ("\n", "ab\ncd\nef\3", [2, 5, 8]),  # the last step ends with EOS
    ("\n", "ab\ncd\n\3", [2, 5]),  # or with its separator
    ("\n", "ab\n\n\ncd", [2, 6]),  # a blank line ends no step
    ("\n", "\n ab\ncd", [4, 6]), ("\n\n", "ab\ncd\n\nef", [6, 8]), ("\n\n", "a\n\n\nb", [2, 4]), ("\n", "abc", [2]),
    ("\n", "\3", [0]),  # a response has one step at least
    ("\n", "\n\n", [1]),
])  # fmt: skip
def test_which_tokens_end_steps(separator: str, text: str, ends: list[int]) -> None:
    tokenizer = CharacterTokenizer()
    assert StepEnds(separator, tokenizer.decode).of(tokenizer.encode(text)) == ends


def test_what_a_token_has_after_the_separator_is_of_the_next_step_and_few_tokens_are_decoded_again() -> None:
    words = {0: "a", 1: "b\nc", 2: "\n", 3: "", 4: ".\n\n", 5: "x\ny\nz"}
    step_ends = StepEnds("\n", lambda ids: "".join(words[i] for i in ids))
    assert step_ends.of([0, 1, 2, 3]) == [1, 2], "c is a step"
    assert step_ends.of([0, 1, 3]) == [1, 2], "also at the end of the response"
    assert step_ends.of([0, 4, 0, 3]) == [1, 3], "one token, one end"
    assert step_ends.of([5, 3]) == [0, 1], "a token ends one step at most, and z is another"

    words = {0: " a", 1: " |", 3: ""}  # by a decoder that drops the space in front, as sentencepiece's does
    step_ends = StepEnds(" |", lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert step_ends.of([0, 1, 1, 3]) == [1] and step_ends.of([0, 1, 1, 0, 1, 3]) == [1, 4]
    decode = mock.Mock(side_effect=CharacterTokenizer().decode)
    response = [ord(character) for character in ("a" * 19 + "\n") * 500]
    assert len(StepEnds("\n", decode).of(response)) == 500
    assert sum(len(call.args[0]) for call in decode.call_args_list) < 3 * len(response)
