"""Measuring and choosing: turns, close placements, noise, failures, the reason and its record.  Times are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.model import ParallelConfig, PlacementConfig
from oppo_megatron.errors import PlacementError
from oppo_megatron.layout.candidates import (
    CONFIRMED_RUNS,
    Candidate,
    Choice,
    LeftOut,
    Machine,
    Options,
    Run,
    Trial,
    choose,
    measure_all,
    read_run,
    to_record,
)

SINGLE = Candidate(PlacementConfig(mode="single"))
PAIR = Candidate(PlacementConfig(mode="disaggregated", scorer=ParallelConfig()))
REPLICAS = Candidate(PlacementConfig(mode="colocated", actor=ParallelConfig(dp=2)))
ALL = (SINGLE, PAIR, REPLICAS)
OPTIONS = Options(Machine("cpu", 2), ALL, (LeftOut("colocated tp 2", "1 key/value head does not divide"),))


class Bench:
    def __init__(self, seconds: Mapping[str, Sequence[float | str]]):
        self.seconds, self.calls = seconds, list[tuple[str, int]]()

    def __call__(self, candidate: Candidate, turn: int) -> Run:
        self.calls.append((candidate.name, turn))
        given_s = self.seconds[candidate.name]
        now = given_s[min(turn, len(given_s)) - 1]
        if isinstance(now, str):
            raise PlacementError(now)
        return Run(steps=2, tokens=200, seconds=2 * now, decode_s=now, train_s=now / 2)


def decide(*seconds: Sequence[float | str]) -> tuple[Choice, Bench, list[Trial]]:
    bench = Bench({candidate.name: given_s for candidate, given_s in zip(ALL, seconds, strict=True)})
    trials = measure_all(ALL, bench)
    return choose(OPTIONS, trials), bench, trials


def test_a_clear_case_is_measured_once() -> None:
    choice, bench, _ = decide([3.0], [2.0], [2.5])
    assert bench.calls == [(candidate.name, 1) for candidate in ALL]
    assert choice.candidate == PAIR and choice.margin == pytest.approx(0.25)
    assert choice.reason == (
        "disaggregated 1 | 1 trains 50 tokens/s (2 s per step); the next, colocated dp 2, needs 25.0% more time; "
        "most of it in rounds that decode: 1 s per step against 1.25"
    )


def test_close_ones_are_measured_again_in_turn_and_one_odd_run_does_not_decide() -> None:
    choice, bench, trials = decide([2.0], [1.96, 2.1, 2.12], [2.5])
    assert bench.calls[3:] == [("single", 2), (PAIR.name, 2), ("single", 3), (PAIR.name, 3)]
    assert choice.candidate == SINGLE and choice.margin == pytest.approx(0.05)
    assert "2 are this close and were run 3 times or more; runs of one placement differ by up to 7.6%" in choice.reason
    assert "take it as a draw" in choice.reason
    assert trials[1].spread == pytest.approx(0.16 / 2.1)


def test_one_that_was_lucky_leads_others_to_be_measured_again() -> None:
    """The first run of the second is too good; then the third, which was too far off, is close too."""
    choice, bench, _ = decide([2.0], [1.92, 2.3, 2.3], [2.08])
    assert choice.candidate == SINGLE
    assert [turn for name, turn in bench.calls if name == REPLICAS.name] == [1, 2, 3]


def test_a_real_margin_within_the_noise_of_no_run_is_no_draw() -> None:
    choice, _, _ = decide([2.0], [2.04], [9.0])
    assert choice.candidate == SINGLE and "draw" not in choice.reason and "differ by up to 0.0%" in choice.reason


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(-0.014, 0.014), min_size=CONFIRMED_RUNS, max_size=CONFIRMED_RUNS), min_size=3, max_size=3),
)
def test_with_small_noise_the_choice_is_within_3_percent_of_the_best(true: list[float], noise: list[list[float]]) -> None:
    times = [[seconds * (1 + share) for share in shares] for seconds, shares in zip(true, noise, strict=True)]
    choice, bench, _ = decide(*times)
    assert true[ALL.index(choice.candidate)] <= 1.03 * min(true)
    assert len(bench.calls) <= CONFIRMED_RUNS * len(ALL)


def test_placements_that_do_other_work_are_compared_by_the_token() -> None:
    def measure(candidate: Candidate, turn: int) -> Run:
        tokens, seconds = (100, 1.0) if candidate == SINGLE else (210, 2.0)
        return Run(2, tokens, seconds, 0.5, 0.1)

    trials = measure_all([SINGLE, PAIR], measure)
    assert choose(OPTIONS, trials).candidate == PAIR


def test_one_that_fails_is_left_out_with_its_reason_and_not_tried_again() -> None:
    choice, bench, trials = decide(["out of memory"], [2.0], [2.01])
    assert choice.candidate == PAIR and bench.calls.count(("single", 1)) == 1
    assert ("single", 2) not in bench.calls and (PAIR.name, 2) in bench.calls
    record = to_record("key", OPTIONS, trials, choice)
    assert record["candidates"][0]["failure"] == "out of memory" and "seconds_per_token" not in record["candidates"][0]


def test_of_failures_the_only_one_that_ran_is_left_or_the_first_error() -> None:
    assert decide([1.99, "lost a peer"], [2.0], [2.5])[0].candidate == PAIR, "it failed when it was measured again"
    choice, _, _ = decide(["no"], [2.0], ["no"])
    assert choice.candidate == PAIR and choice.margin is None
    assert choice.reason.endswith("of 3 placements it is the only one that ran")
    with pytest.raises(PlacementError, match="none of 3 .* the first, single, ended with: rows.jsonl:3 is not JSON"):
        decide(["rows.jsonl:3 is not JSON"], ["b"], ["c"])


def test_the_only_candidate_is_not_measured() -> None:
    choice = choose(Options(Machine("cuda", 1), (SINGLE,), ()), [])
    assert choice.candidate == SINGLE and choice.margin is None
    assert "only placement to choose from on 1 CUDA device; nothing measured" in choice.reason


def test_the_record_gives_the_choice_back() -> None:
    choice, _, trials = decide([3.0], [2.0], [2.5])
    record: dict[str, Any] = json.loads(json.dumps(to_record("key", OPTIONS, trials, choice)))
    assert Candidate.of_record(record) == PAIR and record["key"] == "key"
    assert record["machine"] == {"device": "cpu", "units": 2}
    assert record["left_out"] == [{"name": "colocated tp 2", "reason": "1 key/value head does not divide"}]
    rows = {row["name"]: row for row in record["candidates"]}
    assert rows["single"]["step_seconds"] == 3.0 and rows["single"]["seconds_per_token"] == pytest.approx(0.03)
    assert rows["single"]["runs"] == [{"steps": 2, "tokens": 200, "seconds": 6.0, "decode_s": 3.0, "train_s": 1.5}]


def line(step_s: float, mean: float, deferred: dict[str, int]) -> dict[str, Any]:
    return {"step_s": step_s, "decode_s": 1.0, "train_s": 0.5, "trained_len_mean": mean, "deferred": deferred}


def test_figures_of_a_run_leave_out_the_first_step() -> None:
    run = read_run([line(9.0, 99.0, {"0": 4}), line(2.0, 10.0, {"0": 3, "1": 1}), line(3.0, 12.5, {"0": 4})])
    assert run == Run(steps=2, tokens=90, seconds=5.0, decode_s=2.0, train_s=1.0)
    assert run.other_s == 2.0 and run.seconds_per_token == pytest.approx(5 / 90)
    with pytest.raises(PlacementError, match="has 1 step, but the first one only warms up"):
        read_run([line(9.0, 99.0, {"0": 4})])
