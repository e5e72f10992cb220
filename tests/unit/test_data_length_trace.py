"""Length traces: both formats against numpy on real files, scaling, and every way in which a file is refused."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oppo_megatron.config.ppo import LENGTH_DRAW, ForcedLengths, RolloutConfig
from oppo_megatron.data.length_trace import LengthTrace, forced_quantile, read_length_trace, trace_problems
from oppo_megatron.engine.sampler import uniforms
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import DataError

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


def drawn(config: tuple[ForcedLengths, int], count: int, seed: int = 3) -> list[int]:
    forced, limit = config
    settings = RolloutConfig(batch_size=4, max_response_tokens=limit)
    stopping = Stopping.of(settings, (7,), seed, forced_quantile(forced, limit), forced=forced)
    assert stopping.eos_ids == ()
    return [stopping.limit(seq_id) for seq_id in reversed(range(count))][::-1]


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "column", "lengths"),
    [
        (AZURE, None, azure),
        (AZURE, "ContextTokens", lambda path: azure(path, "ContextTokens")),
        (DEEPSEEK, None, deepseek),
        (DEEPSEEK, "input", lambda path: deepseek(path, "input")),
    ],
)
def test_real_traces_have_numpys_quantiles(
    shared_data: Path, name: str, column: str | None, lengths: Callable[[Path], np.ndarray]
) -> None:
    expected, trace = lengths(shared_data / name), read_length_trace(shared_data / name, column)
    assert trace.requests[-1] == len(expected)
    shares = np.random.default_rng(1).random(2000)
    assert [trace.quantile(float(u)) for u in shares] == np.quantile(expected, shares, method="inverted_cdf").tolist()
    assert trace.percentile_99 == np.quantile(expected, 0.99, method="inverted_cdf")


@pytest.mark.parametrize(("name", "lengths", "seed"), [(AZURE, azure, 3), (DEEPSEEK, deepseek, 4)])
def test_drawn_lengths_are_the_real_traces_quantiles_by_seed_and_sequence(
    shared_data: Path, name: str, lengths: Callable[[Path], np.ndarray], seed: int
) -> None:
    expected, count = lengths(shared_data / name), 4000
    shares = uniforms(seed, range(count), [LENGTH_DRAW] * count)
    lengths_drawn = drawn(rollout(shared_data / name, scale=1.0), count, seed)
    assert lengths_drawn == np.quantile(expected, shares, method="inverted_cdf").tolist()


@pytest.mark.parametrize("name", [AZURE, DEEPSEEK])
def test_auto_makes_the_99th_percentile_the_limit(shared_data: Path, name: str) -> None:
    lengths = np.array(drawn(rollout(shared_data / name, limit=256), 20000))
    assert lengths.min() >= 1 and lengths.max() == 256
    # One in a hundred lies at or beyond the percentile; beside it what rounds up to the limit, less than one more.
    assert 0.007 < (lengths == 256).mean() < 0.02
    unscaled = np.array(drawn(rollout(shared_data / name, scale=1.0), 20000))
    factor = 256 / read_length_trace(shared_data / name).percentile_99
    assert lengths.tolist() == np.clip(np.rint(unscaled * factor), 1, 256).tolist()


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    rows = write(tmp_path, "\ufeffn , Tokens\na,5\n\nb,2\r\nc, 5\n")
    histogram = tmp_path / "histogram.csv"
    histogram.write_text("requests,kind,tokens\n9,input,77\n1,output,2\n2,output,5\n0,output,9\n")
    expected = LengthTrace((2, 5), (1, 3))
    assert read_length_trace(rows, "Tokens") == read_length_trace(histogram) == expected
    assert read_length_trace(histogram, "input") == LengthTrace((77,), (9,))


def test_lengths_of_0_become_1_and_the_scale_is_a_factor(tmp_path: Path) -> None:
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
    (
        HISTOGRAM + "output,5,1\n",
        "inptu",
        r"0 requests of kind `inptu`.*its kinds are output: name another, as in .*\[FILE, KIND\]",
    ),
    (HISTOGRAM + "output,5,-1\n", None, r"trace\.csv:2: `requests` is '-1', but must be a whole number"),
    (HISTOGRAM + "output,x,1\n", None, r"trace\.csv:2: `tokens` is 'x', but must be a whole number"),
    (HISTOGRAM + "output,5,\n", None, r"trace\.csv:2: `requests` is '', but must be a whole number"),
    (REQUESTS.encode() + b"t,1,5\nt\xff,1,5\n", None, r"trace\.csv:3: column 'TIMESTAMP' is not UTF-8; save"),
    (REQUESTS + '"t,1,5\n', None, r"trace\.csv:2: not CSV \(.*close its quotation marks"),
    (
        REQUESTS + "t,1,0\n",
        None,
        r"99th percentile of its lengths is 0 tokens.*as in rollout\.forced_lengths: \[.*trace\.csv, COLUMN\]",
    ),
]


@pytest.mark.parametrize(("text", "column", "message"), REFUSED)
def test_a_wrong_file_is_refused_with_line_rule_and_remedy(
    tmp_path: Path, text: str | bytes, column: str | None, message: str
) -> None:
    config = rollout(write(tmp_path, text), column=column)
    with pytest.raises(DataError, match=message) as refusal:
        forced_quantile(*config)
    assert "trace.csv" in str(refusal.value)
    assert trace_problems(*config) == [f"rollout.forced_lengths: {refusal.value}"]


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a file; rollout\.forced_lengths must be a CSV file: correct"):
        read_length_trace(tmp_path)


def test_a_trace_that_was_not_read_is_our_own_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="read before"):
        forced = ForcedLengths(trace=tmp_path / "x.csv")
        Stopping.of(RolloutConfig(batch_size=4, max_response_tokens=9), (7,), 3, forced=forced)
