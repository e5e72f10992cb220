"""Draws of tokens, on their numbers, against a plain inversion; and the ends of responses: ids, texts, limits, forced lengths."""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, median, pstdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.ppo import ForcedLengths, RolloutConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer, require_stop_texts, train_sentencepiece
from oppo_megatron.engine.sampler import Sampling, draw, draw_at, uniforms_at
from oppo_megatron.engine.stopping import Stopping, StopText
from oppo_megatron.errors import ConfigError
from oppo_megatron.records import Members
from oppo_megatron.uniforms import row_state, uniforms
from tests.support.tokenizers import save_byte_level

MASK = 2**64 - 1
EARLIER_DRAWS = {
    Sampling(seed=5): [[21, 67, 44, 77], [15, 72, 74, 77], [20, 48, 50, 34]],
    Sampling(0.7, seed=5): [[21, 66, 44, 77], [15, 72, 74, 77], [20, 48, 50, 34]],
    Sampling(1.3, top_k=12, top_p=0.8, seed=5): [[88, 48, 19, 16], [70, 11, 50, 16], [88, 29, 87, 77]],
    Sampling(0.0): [[33, 17, 1, 22]] * 3,
}
UINT32 = st.integers(0, 2**32 - 1)


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014, in exact integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_uniform(seed: int, seq_id: int, position: int) -> float:
    return (splitmix64(splitmix64(splitmix64(seed) ^ seq_id) ^ position) >> 11) / 2**53


def plain_truncation(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution a token is drawn from, by sorting a row in Python floats; 0 outside its support."""
    scaled = [x / sampling.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: sampling.top_k or None]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total, reached, kept = sum(weights.values()), 0.0, {}
    for i in order:
        kept[i] = weights[i]
        reached += weights[i] / total
        if reached >= sampling.top_p:
            break
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@given(seed=UINT32, pairs=st.lists(st.tuples(UINT32, UINT32), min_size=1, max_size=8))
def test_uniforms_equal_splitmix64_in_exact_integers(seed: int, pairs: list[tuple[int, int]]) -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # as published: the first output of the generator seeded with 0
    expected = [plain_uniform(seed, *pair) for pair in pairs]
    assert uniforms(seed, [p[0] for p in pairs], [p[1] for p in pairs]) == expected


def test_uniforms_are_distinct_and_uniform() -> None:
    pairs = [(seq, position) for seq in range(50) for position in range(100)]
    values = np.concatenate([uniforms(seed, *zip(*pairs, strict=True)) for seed in range(4)])
    assert len(set(values.tolist())) == len(values) == 20_000
    assert 0 <= values.min() and values.max() < 1
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    assert ((counts - len(values) / 64) ** 2 / (len(values) / 64)).sum() < 63 + 4 * math.sqrt(2 * 63)
    table = values.reshape(4, 50, 100)
    for axis in range(3):  # neighbours in seed, sequence or position are not related
        left, right = np.delete(table, -1, axis).ravel(), np.delete(table, 0, axis).ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(len(left))


@pytest.mark.parametrize("sampling", [
    Sampling(seed=5), Sampling(0.7, seed=5), Sampling(1.3, top_k=4, seed=5), Sampling(1.0, top_k=6, top_p=0.7, seed=5),
])  # fmt: skip
def test_frequencies_follow_the_distribution(sampling: Sampling) -> None:
    logits = [0.3, -1.0, 2.0, 1.1, -0.5, 0.0, 1.7, -2.5]
    num = 20_000
    tokens = draw(torch.tensor(logits).expand(num, -1), sampling, range(num), [3] * num).tokens
    expected = np.array(plain_truncation(logits, sampling)) * num
    counts = np.bincount(tokens.numpy(), minlength=len(logits))
    inside = expected > 0
    assert counts[~inside].sum() == 0
    freedom = inside.sum() - 1
    assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < freedom + 4 * math.sqrt(2 * freedom)


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 1.7]), top_k=st.integers(0, 14), top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    seq_id=UINT32,
)  # fmt: skip
def test_draw_inverts_the_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, seq_id: int) -> None:
    sampling = Sampling(temperature, top_k, top_p, seed=11)
    result = draw(torch.tensor([logits]), sampling, [seq_id], [2])
    token, logprob = int(result.tokens), float(result.logprobs)
    probs = plain_truncation(logits, sampling)
    scaled = np.array(logits) / temperature
    assert logprob == pytest.approx(scaled[token] - np.logaddexp.reduce(scaled), abs=1e-5)
    order = sorted(range(len(logits)), key=lambda i: -logits[i]) if (top_k or top_p < 1) else range(len(logits))
    ends = np.cumsum([probs[i] for i in order])
    u = plain_uniform(11, seq_id, 2)
    edges = np.concatenate([ends, np.cumsum([math.exp(x - scaled.max()) for x in sorted(scaled)[::-1]])])
    clear_cut = np.abs(ends - u).min() > 1e-5 and np.abs(edges - top_p).min() > 1e-6
    if clear_cut:  # away from the rounding of a boundary the token is determined
        assert token == list(order)[int(np.searchsorted(ends, u, side="right"))]
        assert float(result.sampling_logprobs) == pytest.approx(math.log(probs[token]), abs=1e-4)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5), Sampling(top_p=0.6)])
def test_tokens_of_probability_zero_are_never_drawn(u: float, sampling: Sampling) -> None:
    rows = torch.full((3, 9), -300.0)  # exp underflows to 0 in float32
    for row, alive in zip(rows, ([4], [2, 6], [1, 3, 7]), strict=True):
        row[alive] = torch.tensor([1.0, 0.0, 0.5])[: len(alive)]
    result = draw_at(rows, sampling, torch.full((3,), u, dtype=torch.float64))
    for token, alive in zip(result.tokens.tolist(), ([4], [2, 6], [1, 3, 7]), strict=True):
        assert token in alive
    assert torch.isfinite(result.logprobs).all() and torch.isfinite(result.sampling_logprobs).all()


def test_the_last_number_before_one_draws_the_last_possible_token() -> None:
    u_R = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)  # 1.0 in float32
    first, last = draw_at(torch.zeros(2, 50_000), Sampling(), u_R).tokens.tolist()
    assert first == 0 and last > 49_990


def test_greedy_takes_the_best_token_whatever_the_seed() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        result = draw(logits, Sampling(0.0, top_k=3, top_p=0.5, seed=seed), range(6), range(6))
        assert torch.equal(result.tokens, logits.argmax(-1))
        assert (result.logprobs - torch.log_softmax(logits.double(), -1).amax(-1)).abs().max() < 1e-6
        assert torch.equal(result.sampling_logprobs, torch.zeros(6))


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    for sampling in (Sampling(seed=3), Sampling(0.8, top_k=7, top_p=0.9, seed=3)):
        together = draw(logits, sampling, range(16), range(100, 116)).tokens.tolist()
        assert together == [int(draw(logits[i : i + 1], sampling, [i], [100 + i]).tokens) for i in range(16)]
        assert together != draw(logits, sampling, range(16), range(101, 117)).tokens.tolist()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(0.8, 7, 0.9, seed=3), Sampling(1.3, seed=3)])
def test_greedy_sequences_take_the_best_token_and_move_no_bit_of_the_others(sampling: Sampling, size: int) -> None:
    logits_RV = torch.randn(24, 300, generator=torch.Generator().manual_seed(4))
    mixed, seq_ids, positions = replace(sampling, members=Members(size, greedy=True)), range(40, 64), range(24)
    found, plain = draw(logits_RV, mixed, seq_ids, positions), draw(logits_RV, sampling, seq_ids, positions)
    greedy_R = torch.tensor([seq_id % (size + 1) == size for seq_id in seq_ids])
    best = draw(logits_RV, Sampling(0.0), seq_ids, positions)
    for each in ("tokens", "logprobs", "sampling_logprobs", "masses"):
        assert torch.equal(getattr(found, each)[~greedy_R], getattr(plain, each)[~greedy_R]), each
        assert torch.equal(getattr(found, each)[greedy_R], getattr(best, each)[greedy_R]), each
    assert torch.equal(found.tokens[greedy_R], logits_RV[greedy_R].argmax(-1))
    assert not torch.equal(found.tokens, plain.tokens), "some greedy row should have drawn another token"
    u_R = torch.tensor(uniforms(3, seq_ids, positions), dtype=torch.float64)
    assert torch.equal(draw_at(logits_RV, mixed, u_R, greedy_R=greedy_R).table(), found.table())


def test_draws_are_those_that_they_have_always_been() -> None:
    """Tokens as earlier versions drew them: a run goes on with the draws that it began with."""
    logits_RV = (torch.arange(4 * 90) % 37).view(4, 90).double().sin().float() * 3
    for sampling, expected in EARLIER_DRAWS.items():
        drawn = [draw(logits_RV, sampling, [7, 8, 9, 2**40], [position] * 4).tokens.tolist() for position in (0, 1, 500)]
        assert drawn == expected, sampling


def test_sampling_takes_the_rollout_section() -> None:
    section = RolloutConfig(batch_size=1, max_response_tokens=4, temperature=0.6, top_k=9, top_p=0.8)
    assert Sampling.of(section, 42) == Sampling(0.6, 9, 0.8, 42)
    assert Sampling.of(section, 42, Members(2, greedy=True)).members == Members(2, greedy=True)


@given(
    seed=st.integers(0, MASK), pairs=st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**63 - 1)), min_size=1, max_size=8)
)
def test_numbers_made_on_the_device_are_those_of_the_host(seed: int, pairs: list[tuple[int, int]]) -> None:
    seq_ids, positions = [p[0] for p in pairs], [p[1] for p in pairs]
    states_R = torch.from_numpy(np.array([row_state(seed, i) for i in seq_ids], dtype=np.uint64).view(np.int64))
    assert uniforms_at(states_R, torch.tensor(positions)).tolist() == uniforms(seed, seq_ids, positions)


def test_a_row_that_is_no_distribution_leaves_the_others_alone() -> None:
    """The draw itself has to go through: on the device nobody looks before the tokens are read."""
    for sampling in (Sampling(), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(0.0)):
        logits_RV = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
        u_R = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
        expected = draw_at(logits_RV, sampling, u_R)
        logits_RV[1], logits_RV[3, 7] = math.inf, math.nan
        found = draw_at(logits_RV, sampling, u_R)
        assert found.masses.isfinite().tolist() == [True, False, True, False, True]
        cold = draw(torch.tensor([[1.0, 2.0]]), Sampling(1e-45), [5], [2])
        assert not cold.masses.isfinite().any(), "logits over this temperature overflow"
        sound = [0, 2, 4]
        assert torch.equal(found.tokens[sound], expected.tokens[sound])
        assert torch.equal(found.logprobs[sound], expected.logprobs[sound])
        assert ((found.tokens >= 0) & (found.tokens < 300)).all()


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
    texts = ((count, tokenizer.decode(response[:count])) for count in range(1, len(response) + 1))
    return next((count for count, text in texts if any(stop in text for stop in stops)), None)


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
            assert (known + count, reason) == ((len(response), None) if end is None else (end, "stop")), (stops, response)
        found += end is not None
        beyond += end is not None and end > 40
    assert found > 40 and beyond > 3


def test_an_id_counts_before_a_text_a_text_before_the_limit_and_few_tokens_are_decoded_again() -> None:
    stopping = Stopping((7, 9), 3, text=StopText(["b"], lambda ids: "".join("abc"[i % 3] for i in ids)))
    tokens_RK = np.array([[0, 9, 1], [7, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 9, 0]])
    counts, reasons = stopping.ends(tokens_RK, [3, 1, 3, 3, 4, 2], [[]] * 6)
    assert (counts, reasons) == ([2, 1, 3, 3, 3, 1], ["eos", "eos", "stop", "length", None, "stop"])
    assert Stopping((), 3).ends(tokens_RK[:2], [2, 9], ()) == ([2, 3], ["length", None])
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


def stopping(limit: int = 10**6, seed: int = 3, **forced: float) -> Stopping:
    rollout = RolloutConfig(batch_size=4, max_response_tokens=limit)
    return Stopping.of(rollout, (7,), seed, forced=ForcedLengths(**forced) if forced else None)


def test_forced_lengths_are_log_normal_within_limits_and_depend_on_seed_and_sequence_only() -> None:
    plain, forced = stopping(limit=40), stopping(median=2000, sigma=0.8)
    assert plain.eos_ids == (7,) and {plain.limit(seq_id) for seq_id in range(100)} == {40} and forced.eos_ids == ()
    logs = sorted(math.log(forced.limit(seq_id)) for seq_id in range(4000))
    assert abs(median(logs) - math.log(2000)) < 0.05 and abs(pstdev(logs) - 0.8) < 0.03
    expected = NormalDist(math.log(2000), 0.8)
    distance = max(abs(expected.cdf(x) - (i + 0.5) / len(logs)) for i, x in enumerate(logs))
    assert distance < 1.95 / math.sqrt(len(logs))  # Kolmogorov-Smirnov at the level 0.001
    lengths = [stopping(limit=64, median=20, sigma=3).limit(seq_id) for seq_id in range(500)]
    assert min(lengths) == 1 and max(lengths) == 64 and len(set(lengths)) > 20
    first, again, other = (stopping(median=100, sigma=1, seed=seed) for seed in (3, 3, 4))
    assert [first.limit(i) for i in range(50)] == [again.limit(i) for i in reversed(range(50))][::-1]
    assert [first.limit(i) for i in range(50)] != [other.limit(i) for i in range(50)]
    assert {stopping(median=12, sigma=0).limit(seq_id) for seq_id in range(20)} == {12}
