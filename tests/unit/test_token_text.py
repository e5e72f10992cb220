"""The ends of steps: a function of token ids, whatever the tokenizer's borders."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from oppo_megatron.token_text import StepEnds
from tests.support.tokenizers import CharacterTokenizer, save_byte_level

TEXTS = [
    f"Step {a}: so {a} plus {b}.\n\nStep {b}: the sum  is {a + b}.\ncaf\u00e9 \u65e5\u672c \u043a\u0438\nA: {a + b}\n"
    for a in range(30)
    for b in range(30)
]
SEPARATORS = ["\n", "\n\n", ".\n", " \u043a\u0438\n", "\u65e5", "Step ", "  ", "is 1", "\n\nStep"]


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte-level", "over words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Sentencepiece with a newline of its own; byte-level BPE, also such that ".\\n\\nStep " is one token."""
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    if request.param in ("byte-level", "over words"):
        over_words = request.param == "over words"
        made = load_tokenizer(TokenizerConfig(path=save_byte_level(path.parent, TEXTS, over_words=over_words)))
        assert len(made.encode(".\n\nStep ")) == (1 if over_words else 5)
        return made
    train_sentencepiece(TEXTS, path, 293, model_type=request.param, character_coverage=0.98)
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
        text = draws.choice(TEXTS)
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


def test_ids_of_any_kind_have_ends(tokenizer: Tokenizer) -> None:
    draws = random.Random(6)
    for _ in range(200):
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


@pytest.mark.parametrize(
    "separator, text, ends",
    [
        ("\n", "ab\ncd\nef\3", [2, 5, 8]),  # the last step ends with EOS
        ("\n", "ab\ncd\n\3", [2, 5]),  # or with its separator
        ("\n", "ab\n\n\ncd", [2, 6]),  # a blank line ends no step
        ("\n", "\n ab\ncd", [4, 6]),
        ("\n\n", "ab\ncd\n\nef", [6, 8]),
        ("\n\n", "a\n\n\nb", [2, 4]),
        ("\n", "abc", [2]),
        ("\n", "\3", [0]),  # a response has one step at least
        ("\n", "\n\n", [1]),
    ],
)
def test_which_tokens_end_steps(separator: str, text: str, ends: list[int]) -> None:
    tokenizer = CharacterTokenizer()
    assert StepEnds(separator, tokenizer.decode).of(tokenizer.encode(text)) == ends


def test_what_a_token_has_behind_the_separator_is_of_the_next_step() -> None:
    words = {0: "a", 1: "b\nc", 2: "\n", 3: "", 4: ".\n\n", 5: "x\ny\nz"}

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids)

    step_ends = StepEnds("\n", decode)
    assert step_ends.of([0, 1, 2, 3]) == [1, 2], "c is a step"
    assert step_ends.of([0, 1, 3]) == [1, 2], "also at the end of the response"
    assert step_ends.of([0, 4, 0, 3]) == [1, 3], "one token, one end"
    assert step_ends.of([5, 3]) == [0, 1], "a token ends one step at most, and z is another"


def test_a_decoder_that_drops_the_space_in_front_hides_no_separator() -> None:
    """A sentencepiece decoder with a dummy prefix does: alone, the second " |" would be the text of a step."""
    words = {0: " a", 1: " |", 3: ""}

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert StepEnds(" |", decode).of([0, 1, 1, 3]) == [1]
    assert StepEnds(" |", decode).of([0, 1, 1, 0, 1, 3]) == [1, 4]


def test_few_tokens_are_decoded_again() -> None:
    seen = 0

    def decode(ids: list[int]) -> str:
        nonlocal seen
        seen += len(ids)
        return "".join(chr(i) for i in ids)

    response = [ord(character) for character in ("a" * 19 + "\n") * 500]
    assert len(StepEnds("\n", decode).of(response)) == 500
    assert seen < 3 * len(response)
