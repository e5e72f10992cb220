"""The least time of a run's work: counts by hand, and peaks of this machine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.limit import Response, decode_batches, decode_steps, least_seconds
from benchmarks.peaks import Peaks, measure_peaks
from oppo_megatron.layout.shape import causal_pairs
from tests.unit.test_bench_suite import without_critic as config
from tests.unit.test_layout_shape import LLAMA

PEAKS = Peaks("float32", {1: 1e9}, {1: 1e9}, {1: {1: 1e9, 8: 1e9}})


def test_the_least_time_counts_the_scorers_that_there_are() -> None:
    responses = [Response(5, 7, 7), Response(6, 4, 9)]
    found = {name: least_seconds(config(name), responses, PEAKS, 1) for name in ("dapo", "grpo")}
    assert found["dapo"]["score_s"] == 0 < found["grpo"]["score_s"]
    for name in found:
        assert found[name]["train_s"] > 0
        assert found[name]["least_s"] == pytest.approx(sum(found[name][key] for key in ("decode_s", "score_s", "train_s")))


def test_decode_steps_are_those_of_a_clock() -> None:
    # Clocks 1 to 6.  The first sequence: tokens at clocks 1..4; the second, carried or late: at clocks 3..4; the third at 6.
    responses = [Response(10, 4, 4), Response(5, 2, 4), Response(7, 1, 6)]
    sequences, keys = decode_steps(responses)
    assert sequences == [1, 1, 2, 2, 1], "nothing runs at clock 5"
    assert keys == [10, 11, 12 + 5, 13 + 6, 7]
    assert sum(keys) == sum(causal_pairs(r.prompt_tokens - 1, r.tokens) for r in responses)
    assert decode_batches(6) == [1, 2, 4, 6] and decode_batches(8) == [1, 2, 4, 8]


def test_peaks_are_measured_on_this_machine() -> None:
    before = torch.get_num_threads()
    peaks = measure_peaks(LLAMA, "float32", [1, 4], [1])
    assert torch.get_num_threads() == before
    # Any processor that runs this does more than 0.1 GFLOP/s and reads more than 0.1 GB/s, and less than 10^6 of both.
    assert 1e8 < peaks.flops[1] < 1e15 and 1e8 < peaks.read_bytes[1] < 1e15
    assert set(peaks.decode_flops[1]) == {1, 4}
    assert peaks.lines()[0].startswith("1 thread(s), float32: GEMM ")
