"""The end of responses: texts, found where they are complete first, wherever the borders of tokens lie; forced lengths."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import NormalDist, median, pstdev

import numpy as np
import pytest

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.ppo import ForcedLengths, RolloutConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, require_stop_texts, train_sentencepiece
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import ConfigError
from tests.support.tokenizers import save_byte_level

TEXTS = [f"Q: {a} plus {b}?\n\nA: the sum  is {a + b}. caf\u00e9 \u65e5\u672c \u2581" for a in range(30) for b in range(30)]
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
        end = plain_end(tokenizer, stops, response)
        for known in (0, draws.randrange(end or len(response))):
            (count,), (reason,) = stopping.ends(np.array([response[known:]]), [10**6], [response[:known]])
            expected = (len(response), None) if end is None else (end, "stop")
            assert (known + count, reason) == expected, (stops, response)
        found += end is not None
        beyond += end is not None and end > 40
    assert found > 40 and beyond > 3


def test_an_id_counts_before_a_text_and_a_text_before_the_limit() -> None:
    stopping = Stopping((7, 9), 3, text=StopText(["b"], lambda ids: "".join("abc"[i % 3] for i in ids)))
    tokens_RK = np.array([[0, 9, 1], [7, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 9, 0]])
    counts, reasons = stopping.ends(tokens_RK, [3, 1, 3, 3, 4, 2], [[]] * 6)
    assert (counts, reasons) == ([2, 1, 3, 3, 3, 1], ["eos", "eos", "stop", "length", None, "stop"])
    assert Stopping((), 3).ends(tokens_RK[:2], [2, 9], ()) == ([2, 3], ["length", None])


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
    with pytest.raises(ConfigError, match=rf"'<\|end\|>', which no response contains.*\[{tokenizer.eos_id}\]"):
        require_stop_texts(["<|end|>"], tokenizer, "rollout.stop", "rollout.stop")


EOS = 7


def stopping(limit: int = 10**6, seed: int = 3, **forced: float) -> Stopping:
    rollout = RolloutConfig(batch_size=4, max_response_tokens=limit)
    return Stopping.of(rollout, (EOS,), seed, forced=ForcedLengths(**forced) if forced else None)


def test_without_forced_lengths_eos_and_the_limit_end_a_response() -> None:
    plain = stopping(limit=40)
    assert plain.eos_ids == (EOS,)
    assert {plain.limit(seq_id) for seq_id in range(100)} == {40}


def test_forced_lengths_are_log_normal_and_ignore_eos() -> None:
    forced = stopping(median=2000, sigma=0.8)
    assert forced.eos_ids == ()
    logs = sorted(math.log(forced.limit(seq_id)) for seq_id in range(4000))
    assert abs(median(logs) - math.log(2000)) < 0.05
    assert abs(pstdev(logs) - 0.8) < 0.03
    expected = NormalDist(math.log(2000), 0.8)
    distance = max(abs(expected.cdf(x) - (i + 0.5) / len(logs)) for i, x in enumerate(logs))
    assert distance < 1.95 / math.sqrt(len(logs))  # Kolmogorov-Smirnov at the level 0.001


def test_forced_lengths_stay_within_one_and_the_limit_and_depend_on_seed_and_sequence_only() -> None:
    lengths = [stopping(limit=64, median=20, sigma=3).limit(seq_id) for seq_id in range(500)]
    assert min(lengths) == 1 and max(lengths) == 64 and len(set(lengths)) > 20
    first, again, other = (stopping(median=100, sigma=1, seed=seed) for seed in (3, 3, 4))
    assert [first.limit(i) for i in range(50)] == [again.limit(i) for i in reversed(range(50))][::-1]
    assert [first.limit(i) for i in range(50)] != [other.limit(i) for i in range(50)]
    assert {stopping(median=12, sigma=0).limit(seq_id) for seq_id in range(20)} == {12}
