"""Texts that end responses: found where they are complete first, wherever the borders of tokens lie."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.prompt_tokens import require_stop_texts
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import ConfigError
from tests.support.tokenizers import save_byte_level

TEXTS = [
    f"Q: {a} plus {b}?\n\nA: the sum  is {a + b}. caf\u00e9 \u65e5\u672c \u2581" for a in range(30) for b in range(30)
]
STOPS = ["\n\n", "\nQ:", " is ", "sum  i", "\u00e9", "\u65e5\u672c", "?\n", "12", "a", " ", "the sum  is 1"]
RARE = ["2 plus", "is 31", "5?", "Q: 2", "m  is 4", "is 5"]


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte-level"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    if request.param == "byte-level":
        return load_tokenizer(TokenizerConfig(path=save_byte_level(path.parent, TEXTS)))
    train_sentencepiece(TEXTS, path, 290, model_type=request.param, character_coverage=0.98)
    return load_tokenizer(TokenizerConfig(path=path))


def plain_end(tokenizer: Tokenizer, stops: list[str], response: list[int]) -> int | None:
    """By decoding everything behind each token."""
    for count in range(1, len(response) + 1):
        if any(stop in tokenizer.decode(response[:count]) for stop in stops):
            return count
    return None


def responses(tokenizer: Tokenizer, draws: random.Random) -> list[int]:
    """Text as it is encoded, in other borders, and ids of any kind: bytes alone, special tokens, spare rows of an embedding."""
    ids, size = list[int](), draws.choice([3, 60, 150])
    while len(ids) < size:
        text = draws.choice(TEXTS)
        start = draws.randrange(len(text))
        ids += tokenizer.encode(text[start : start + draws.randrange(1, 12)])
        ids += draws.choices(range(tokenizer.vocab_size + 3), k=draws.randrange(3))
        ids += [tokenizer.eos_id] * (draws.randrange(40) if draws.random() < 0.1 else 0)
    return ids


def test_a_response_ends_with_the_first_token_behind_which_its_text_has_a_stop(tokenizer: Tokenizer) -> None:
    draws, found, beyond = random.Random(5), 0, 0
    for _ in range(200):
        stops, response = draws.sample(draws.choice([STOPS, RARE]), draws.randrange(1, 3)), responses(tokenizer, draws)
        stopping = Stopping((), 10**6, text=StopText(stops, tokenizer.decode))
        ends = (n for n in range(1, len(response) + 1) if stopping.reason(response[:n], 10**6) == "stop")
        end = next(ends, None)
        assert end == plain_end(tokenizer, stops, response), (stops, response)
        found += end is not None
        beyond += end is not None and end > 40
    assert found > 40 and beyond > 3


def test_an_id_counts_before_a_text_and_a_text_before_the_limit() -> None:
    stopping = Stopping((7, 9), 3, text=StopText(["b"], lambda ids: "".join("abc"[i % 3] for i in ids)))
    assert stopping.reason([0, 9], 3) == stopping.reason([7], 1) == "eos"
    assert stopping.reason([0, 0, 1], 3) == "stop"
    assert stopping.reason([0, 0, 0], 3) == "length"
    assert stopping.reason([0, 0], 3) is None


def test_few_tokens_are_decoded_again() -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return "".join(chr(i) for i in ids)

    text, response = StopText(["END"], decode), [ord(c) for c in "a D" * 2000]
    assert not any(text.ends(response[:count]) for count in range(1, len(response) + 1))
    assert max(seen) < 40 and sum(seen) < 50 * 2000


def test_a_text_that_no_response_can_have_is_refused_with_its_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(path=save_byte_level(tmp_path, TEXTS)))
    require_stop_texts(STOPS, tokenizer, "rollout.stop", "rollout.stop")
    with pytest.raises(ConfigError, match=rf"'<\|end\|>', which is in no response's text.*\[{tokenizer.eos_id}\]"):
        require_stop_texts(["<|end|>"], tokenizer, "rollout.stop", "rollout.stop")
