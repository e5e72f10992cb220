"""Prompt sets and the stream: lengths, order, identity over epochs; and lengths that a trace forces."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.clock import ByTime, by_time
from oppo_megatron.config.data import DataConfig, PromptDataConfig
from oppo_megatron.config.ppo import LENGTH_DRAW, ForcedLengths, RolloutConfig
from oppo_megatron.data.length_trace import LengthTrace, forced_quantile, read_length_trace, trace_problems
from oppo_megatron.data.prompts import PromptSet, PromptStream, RowOrder, epoch_order, load_prompts
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import Completion, RowLoader
from oppo_megatron.engine.sampler import uniforms
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import DataError, RewardError
from oppo_megatron.records import Prompt, Source
from tests.support.rows import write_rows
from tests.support.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer()


def plain_set(num_rows: int, responses_per_prompt: int = 1) -> PromptSet:
    return weighted_set([(num_rows, 1.0)], responses_per_prompt)


def weighted_set(files: Sequence[tuple[int, float]], responses_per_prompt: int = 1) -> PromptSet:
    """Files of so many rows, each with a weight."""
    sources = [Source(f"f{number}", weight) for number, (num_rows, weight) in enumerate(files) for _ in range(num_rows)]
    rows = [Prompt(-1, i, chr(97 + i), (97 + i,), {}, f"f:{i + 1}", source) for i, source in enumerate(sources)]
    return PromptSet(rows, responses_per_prompt=responses_per_prompt)


def load(path: Any, check: Any = None, **settings: Any) -> tuple[PromptSet, Quarantine]:
    quarantine = Quarantine()
    return load_prompts(PromptDataConfig(path=path, **settings), TOKENIZER, quarantine=quarantine, check=check), quarantine


def test_rows_become_prompts_with_their_other_columns(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"question": "ab", "answer": "1"}, {"question": "ab", "answer": "2", "id": 7})
    prompts, _ = load(path, prompt_template="Q{prompt}A")
    first, second = prompts.rows
    assert (first.text, first.tokens, first.fields) == ("QabA", tuple(map(ord, "QabA")), {"answer": "1"})
    assert second.fields == {"answer": "2", "id": 7} and second.place == f"{path}:2" and prompts.num_duplicates == 1


def test_rows_are_told_of_by_time_at_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tick of the clock is 1 s, and each row is met three times: nothing is silent for longer than 5 s."""
    path = write_rows(tmp_path, *({"prompt": f"{n}", "completion": "c"} for n in range(10)))

    def completions(quarantine: Quarantine) -> list[Completion]:
        return RowLoader(DataConfig(path=path), TOKENIZER, 9, quarantine).completions()

    for read in (partial(load_prompts, PromptDataConfig(path=path), TOKENIZER), completions):
        told, seconds = list[str](), count()
        read(quarantine=Quarantine(progress=ByTime(told.append, clock=lambda: float(next(seconds)))))  # noqa: B023
        stages = ["reading", "reading", "rendered", "rendered", "tokenized", "tokenized"]
        assert all(stage in line for stage, line in zip(stages, told, strict=True)), told
        assert [line.rsplit(", ")[1] for line in told] == ["5s", "10s", "15s", "20s", "25s", "30s"]
    by_time(is_owner=False)("a line")
    assert capsys.readouterr() == ("", "")


def test_rows_that_a_check_refuses_and_long_prompts_fall_under_their_policies(tmp_path: Path) -> None:
    path = write_rows(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c"})

    def check(fields: Mapping[str, Any]) -> None:
        if "answer" not in fields:
            raise RewardError("no answer here")

    with pytest.raises(DataError, match="(?s)2 rows.*rows.jsonl:2: no answer here.*rows.jsonl:3.*data.bad_rows=quarantine"):
        load(path, check=check)
    kept, quarantine = load(path, check=check, bad_rows="quarantine")
    assert [row.text for row in kept.rows] == ["a"] and [entry["line"] for entry in quarantine.entries] == [2, 3]
    path = write_rows(tmp_path, {"prompt": "123456"}, {"prompt": "12345"}, {"prompt": "abcdefgh"})
    with pytest.raises(DataError, match="(?s)2 rows.*jsonl:1: .*6 tokens.*max_prompt_tokens=5.*jsonl:3.*data.long_rows"):
        load(path, max_prompt_tokens=5, long_rows="error")
    truncated, _ = load(path, max_prompt_tokens=5, long_rows="truncate")
    assert [row.text for row in truncated.rows] == ["23456", "12345", "defgh"], "the end is kept"
    assert truncated.num_truncated == 2 and all(row.tokens == tuple(TOKENIZER.encode(row.text)) for row in truncated.rows)
    kept, quarantine = load(path, max_prompt_tokens=5, long_rows="quarantine")
    assert [row.row for row in kept.rows] == [1] and kept.num_quarantined == 2
    assert [entry["line"] for entry in quarantine.entries] == [1, 3]
    path = write_rows(tmp_path, {"prompt": "123456"}, {"prompt": ""}, [], {"prompt": "ok"})
    with pytest.raises(DataError, match="3 rows") as caught:
        load(path, max_prompt_tokens=5)
    assert all(f"rows.jsonl:{line}:" in str(caught.value) for line in (1, 2, 3))
    assert "data.bad_rows=quarantine" in str(caught.value) and "data.long_rows=quarantine" in str(caught.value)
    path = write_rows(tmp_path, {"prompt": "long"}, {"prompt": "longer"})
    config = PromptDataConfig(path=path, max_prompt_tokens=1, long_rows="quarantine")
    with pytest.raises(DataError, match=r"all 2 rows were set aside.*rows\.jsonl:1"):
        load_prompts(config, TOKENIZER, quarantine=Quarantine([{"file": "earlier", "line": 9, "reason": "other"}]))


def test_real_questions(shared_data: Path) -> None:
    prompts, _ = load(shared_data / "gsm8k_train.jsonl")
    assert len(prompts) == 7473 and all("####" in row.fields["answer"] for row in prompts.rows)


@given(
    num_rows=st.integers(1, 12), epochs=st.none() | st.integers(0, 4), limit=st.none() | st.integers(0, 40),
    start=st.integers(0, 50), seed=st.integers(0, 2**64 - 1), shuffle=st.booleans(),
)  # fmt: skip
def test_stream_is_a_permutation_per_epoch_and_resumes(
    num_rows: int, epochs: Any, limit: Any, start: int, seed: int, shuffle: bool
) -> None:
    prompts = plain_set(num_rows)
    ends = [40, *([] if epochs is None else [epochs * num_rows]), *([] if limit is None else [limit])]
    given_prompts = list(islice(PromptStream(prompts, seed, epochs=epochs, limit=limit, shuffle=shuffle), 40))
    assert [prompt.seq_id for prompt in given_prompts] == list(range(min(ends)))
    for epoch_start in range(0, len(given_prompts) - num_rows + 1, num_rows):
        rows = [prompt.row for prompt in given_prompts[epoch_start : epoch_start + num_rows]]
        assert sorted(rows) == list(range(num_rows))
        assert shuffle or rows == sorted(rows)
    resumed = PromptStream(prompts, seed, epochs=epochs, limit=limit, shuffle=shuffle, start=start)
    assert list(islice(resumed, max(0, 40 - start))) == given_prompts[start:]


@given(
    left_out=st.frozensets(st.integers(0, 30)), limit=st.none() | st.integers(0, 30), epochs=st.integers(0, 5),
    start=st.integers(0, 20),
)  # fmt: skip
def test_what_is_left_out_of_a_stream_counts_for_nothing(left_out: Any, limit: int | None, epochs: int, start: int) -> None:
    plain = list(PromptStream(plain_set(7), 3, epochs=epochs))
    stream = PromptStream(plain_set(7), 3, epochs=epochs, limit=limit, left_out=left_out)
    kept = [prompt for prompt in plain if prompt.seq_id not in left_out][:limit]
    given_prompts = list(stream)
    assert given_prompts == kept and stream.planned == (7 * epochs if limit is None else min(limit, 7 * epochs))
    resumed = PromptStream(plain_set(7), 3, epochs=epochs, limit=limit, left_out=left_out, start=start)
    assert list(resumed) == [prompt for prompt in kept if prompt.seq_id >= start]


@given(num_rows=st.integers(1, 9), responses=st.integers(2, 5), epochs=st.integers(1, 3), start=st.integers(0, 40))
def test_responses_of_a_prompt_are_neighbours_with_own_positions(num_rows: int, responses: int, epochs: int, start: int) -> None:
    once = [prompt.row for prompt in PromptStream(plain_set(num_rows), 3, epochs=epochs)]
    prompts = plain_set(num_rows, responses)
    stream = PromptStream(prompts, 3, epochs=epochs)
    given_prompts = list(stream)
    assert stream.planned == len(given_prompts) == epochs * prompts.rollouts_per_pass
    assert [prompt.row for prompt in given_prompts] == [row for row in once for _ in range(responses)]
    assert [prompt.seq_id for prompt in given_prompts] == list(range(len(given_prompts)))
    assert list(PromptStream(prompts, 3, epochs=epochs, start=start)) == given_prompts[start:]


def test_order_depends_on_seed_and_epoch_and_never_on_the_platform() -> None:
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    # Philox4x64 is a published function: these words, and so this order, are the same everywhere.
    assert epoch_order(8, 1, 0).tolist() == sorted(range(8), key=(philox4x64(1, (1, 0)) + philox4x64(2, (1, 0))).__getitem__)
    with pytest.raises(ValueError, match="seed=-1"):
        epoch_order(3, -1, 0)
    with pytest.raises(DataError, match="empty"):
        PromptStream(plain_set(0), 1)


def philox4x64(counter: int, key: tuple[int, int]) -> list[int]:
    """Salmon et al. 2011, ten rounds, in plain integers."""
    mask = 2**64 - 1
    x, (k0, k1) = [counter & mask, counter >> 64, 0, 0], key
    for _ in range(10):
        high0, low0 = divmod(x[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(x[2] * 0xCA5A826395121157, 2**64)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


def weighted_files() -> st.SearchStrategy[list[tuple[int, float]]]:
    weights = st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0.05, 4).map(lambda weight: round(weight, 3))
    return st.lists(
        st.tuples(st.integers(1, 12), weights).filter(lambda file: file[0] * file[1] >= 1.001), min_size=1, max_size=4
    )


@example(files=[(6, 0.9), (1, 1.2)], num_epochs=3, seed=0, shuffle=True)  # the third epoch has none of the second file
@given(files=weighted_files(), num_epochs=st.integers(1, 7), seed=st.integers(0, 2**64 - 1), shuffle=st.booleans())
def test_each_files_share_is_exact_within_one_row_after_every_epoch_and_its_rows_come_in_turn(
    files: list[tuple[int, float]], num_epochs: int, seed: int, shuffle: bool
) -> None:
    order = RowOrder(weighted_set(files).sources, seed, shuffle)
    starts = np.cumsum([0, *(num_rows for num_rows, _ in files)]).tolist()
    counts, total = Counter[int](), sum(num_rows * Fraction(str(weight)) for num_rows, weight in files)
    for epoch in range(num_epochs):
        assert order.locate(counts.total()) == (epoch, 0)
        counts.update(rows := order.epoch(epoch))
        assert order.locate(counts.total() - 1) == (epoch, len(rows) - 1)
        assert counts.total() == order.rows(epoch + 1) and 0 <= counts.total() - (epoch + 1) * total < 1
        for (num_rows, weight), start in zip(files, starts[:-1], strict=True):
            own = [counts[row] for row in range(start, start + num_rows)]
            share = (epoch + 1) * num_rows * Fraction(str(weight))
            assert abs(sum(own) - share) < 1 and max(own) - min(own) <= 1
            assert weight != int(weight) or len(set(own)) == 1, "a whole weight gives whole passes each epoch"
    assert shuffle or all(order.epoch(epoch) == sorted(order.epoch(epoch), key=lambda row: np.searchsorted(starts, row, "right"))
                          for epoch in range(num_epochs)), "the files' order"  # fmt: skip


@given(
    files=weighted_files(), responses=st.integers(1, 3), start=st.integers(0, 150), seed=st.integers(0, 99),
    epochs=st.integers(1, 4), limit=st.none() | st.integers(0, 60),
)  # fmt: skip
def test_a_weighted_stream_resumes_at_any_position(
    files: list[tuple[int, float]], responses: int, start: int, seed: int, epochs: int, limit: int | None
) -> None:
    prompts = weighted_set(files, responses)
    whole = list(PromptStream(prompts, seed, epochs=epochs, limit=limit))
    assert len(whole) == min(prompts.rollouts(epochs), prompts.rollouts(epochs) if limit is None else limit)
    assert [prompt.seq_id for prompt in whole] == list(range(len(whole)))
    assert list(PromptStream(prompts, seed, epochs=epochs, limit=limit, start=start)) == whole[start:]
    stream = PromptStream(prompts, seed)
    assert all(stream.at(prompt.seq_id) == prompt for prompt in reversed(whole))
    rows = [row for epoch in range(epochs) for row in RowOrder(prompts.sources, seed).epoch(epoch)]
    assert [prompt.row for prompt in whole[::responses]] == rows[: -(-len(whole) // responses)]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 9))
def test_without_weights_any_number_of_files_has_the_order_of_one(sizes: list[int], seed: int, epoch: int) -> None:
    order = RowOrder(weighted_set([(size, 1.0) for size in sizes]).sources, seed)
    assert order.epoch(epoch) == epoch_order(sum(sizes), seed, epoch).tolist()


def test_a_fraction_of_a_file_is_drawn_from_all_of_it_and_too_small_a_one_is_refused() -> None:
    order = RowOrder(weighted_set([(100, 0.25), (5, 1.0)]).sources, 3)
    first = sorted(row for row in order.epoch(0) if row < 100)
    assert len(first) == 25 and first != list(range(25)) and first[-1] > 75
    assert sorted(row for epoch in range(4) for row in order.epoch(epoch) if row < 100) == list(range(100))
    with pytest.raises(
        DataError, match=r"the weight of f0 in data.path is 0.3, .* than one of its 3 usable rows; .* at least 0.334"
    ):
        PromptStream(weighted_set([(3, 0.3), (9, 1.0)]), 1)


def test_a_weighted_file_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a"}\n')
    bad.write_text('{"prompt": 3}\n')
    files = [good, {"path": bad, "weight": 2}]
    with pytest.raises(DataError, match=r"bad.jsonl in data.path has the weight 2, but no usable row; .* or remove the entry"):
        load(files, bad_rows="quarantine")
    assert len(load([good, bad], bad_rows="quarantine")[0]) == 1


AZURE, DEEPSEEK = "trace_azure_2023_conv.csv", "trace_servegen_deepseek_r1_hist.csv"
REQUESTS = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HISTOGRAM = "kind,tokens,requests\n"


def azure(path: Path, column: str = "GeneratedTokens") -> np.ndarray:
    with path.open(newline="") as file:
        return np.array([int(row[column]) for row in csv.DictReader(file)])


def deepseek(path: Path, kind: str = "output") -> np.ndarray:
    with path.open(newline="") as file:
        rows = [(int(r["tokens"]), int(r["requests"])) for r in csv.DictReader(file) if r["kind"] == kind]
    return np.repeat(*np.array(rows).T)


def rollout(trace: Path, limit: int = 10**6, **forced: Any) -> tuple[ForcedLengths, int]:
    return ForcedLengths(trace=trace, **forced), limit


def drawn(config: tuple[ForcedLengths, int], num: int, seed: int = 3) -> list[int]:
    forced, limit = config
    settings = RolloutConfig(batch_size=4, max_response_tokens=limit)
    stopping = Stopping.of(settings, (7,), seed, forced_quantile(forced, limit), forced=forced)
    assert stopping.eos_ids == ()
    return [stopping.limit(seq_id) for seq_id in reversed(range(num))][::-1]


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("name", "column", "lengths"), [
    (AZURE, None, azure), (AZURE, "ContextTokens", lambda path: azure(path, "ContextTokens")), (DEEPSEEK, None, deepseek),
    (DEEPSEEK, "input", lambda path: deepseek(path, "input")),
])  # fmt: skip
def test_real_traces_have_numpys_quantiles(shared_data: Path, name: str, column: str | None, lengths: Any) -> None:
    expected, trace = lengths(shared_data / name), read_length_trace(shared_data / name, column)
    assert trace.requests[-1] == len(expected)
    shares = np.random.default_rng(1).random(2000)
    assert [trace.quantile(float(u)) for u in shares] == np.quantile(expected, shares, method="inverted_cdf").tolist()
    assert trace.percentile_99 == np.quantile(expected, 0.99, method="inverted_cdf")


@pytest.mark.parametrize(("name", "read", "seed"), [(AZURE, azure, 3), (DEEPSEEK, deepseek, 4)])
def test_drawn_lengths_are_quantiles_which_auto_scales_to_the_limit(shared_data: Path, name: str, read: Any, seed: int) -> None:
    path, num = shared_data / name, 8000
    shares = uniforms(seed, range(num), [LENGTH_DRAW] * num)
    unscaled = np.array(drawn(rollout(path, scale=1.0), num, seed))
    assert unscaled.tolist() == np.quantile(read(path), shares, method="inverted_cdf").tolist()
    lengths = np.array(drawn(rollout(path, limit=256), num, seed))
    assert lengths.min() >= 1 and lengths.max() == 256
    # One in a hundred lies at or beyond the percentile; beside it what rounds up to the limit, less than one more.
    assert 0.007 < (lengths == 256).mean() < 0.02
    factor = 256 / read_length_trace(path).percentile_99
    assert lengths.tolist() == np.clip(np.rint(unscaled * factor), 1, 256).tolist()


def test_both_formats_of_lengths_say_the_same_0_becomes_1_and_the_scale_is_a_factor(tmp_path: Path) -> None:
    rows = write(tmp_path, "\ufeffn , Tokens\na,5\n\nb,2\r\nc, 5\n")
    histogram = tmp_path / "histogram.csv"
    histogram.write_text("requests,kind,tokens\n9,input,77\n1,output,2\n2,output,5\n0,output,9\n")
    assert read_length_trace(rows, "Tokens") == read_length_trace(histogram) == LengthTrace((2, 5), (1, 3))
    assert read_length_trace(histogram, "input") == LengthTrace((77,), (9,))
    path = write(tmp_path, REQUESTS + "t,1,0\nt,1,10\n")
    assert set(drawn(rollout(path, scale=2.5), 40)) == {1, 25}
    assert set(drawn(rollout(path, limit=12, scale=2.5), 40)) == {1, 12}
    assert set(drawn(rollout(path, limit=40), 40)) == {1, 40}


REFUSED: list[tuple[str | bytes, str | None, str]] = [
    ("", None, r"no row follows the header"),
    ("a,b\n1,2\n", None, r"must be a column `GeneratedTokens`, but the columns are: a, b; name the one"),
    (REQUESTS + "t,1,2\n", "Length", r"must be a column `Length`.*rollout\.forced_lengths: \[FILE, COLUMN\]"),
    ("a,a\n1,2\n", "a", r"trace\.csv:1: the column name 'a' comes twice in the header; rename one"),
    (REQUESTS, None, r"no row follows the header, but at least one request is needed; add rows"),
    (REQUESTS + "t,1,-4\n", None, r"trace\.csv:2: `GeneratedTokens` is '-4', but must be a whole number of at least 0"),
    (REQUESTS + "t,1,5\n\nt,1,nan\n", None, r"trace\.csv:4: `GeneratedTokens` is 'nan', but must be a whole number"),
    (REQUESTS + "t,1,\n", None, r"trace\.csv:2: `GeneratedTokens` is '', but must be a whole number"),
    (REQUESTS + "t,1\n", None, r"trace\.csv:2: 2 cells, but the header has 3 columns"),
    (REQUESTS + "t,1,1.5\nt,1,inf\n", None, r"(?s)2 rows cannot be used.*:2: .*'1\.5'.*:3: .*'inf'.*Correct them"),
    (REQUESTS + "t,1,1" + "0" * 15 + "\n", None, r"of at most 15 digits"),
    (HISTOGRAM + "output,5,0\n", None, r"0 requests of kind `output`, but at least one is needed; its kinds are output"),
    (HISTOGRAM + "output,5,1\n", "inptu",
        r"0 requests of kind `inptu`.*its kinds are output: name another, as in .*\[FILE, KIND\]"),
    (HISTOGRAM + "output,5,-1\n", None, r"trace\.csv:2: `requests` is '-1', but must be a whole number"),
    (HISTOGRAM + "output,x,1\n", None, r"trace\.csv:2: `tokens` is 'x', but must be a whole number"),
    (HISTOGRAM + "output,5,\n", None, r"trace\.csv:2: `requests` is '', but must be a whole number"),
    (REQUESTS.encode() + b"t,1,5\nt\xff,1,5\n", None, r"trace\.csv:3: column 'TIMESTAMP' is not UTF-8; save"),
    (REQUESTS + '"t,1,5\n', None, r"trace\.csv:2: not CSV \(.*close its quotation marks"),
    (REQUESTS + "t,1,0\n", None,
        r"99th percentile of its lengths is 0 tokens.*as in rollout\.forced_lengths: \[.*trace\.csv, COLUMN\]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "column", "message"), REFUSED)
def test_a_wrong_file_is_refused_with_line_rule_and_remedy(tmp_path: Path, text: Any, column: str | None, message: str) -> None:
    config = rollout(write(tmp_path, text), column=column)
    with pytest.raises(DataError, match=message) as refusal:
        forced_quantile(*config)
    assert "trace.csv" in str(refusal.value) and trace_problems(*config) == [f"rollout.forced_lengths: {refusal.value}"]


def test_a_folder_is_no_trace_and_one_that_was_not_read_is_our_own_bug(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a file; rollout\.forced_lengths must be a CSV file: correct"):
        read_length_trace(tmp_path)
    with pytest.raises(AssertionError, match="read before"):
        forced = ForcedLengths(trace=tmp_path / "x.csv")
        Stopping.of(RolloutConfig(batch_size=4, max_response_tokens=9), (7,), 3, forced=forced)
