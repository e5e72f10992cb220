"""`benchmarks.planning`: the table, and its counts."""

from __future__ import annotations

import pytest

from benchmarks.dry_run import Cluster, DryRun
from benchmarks.planning import bench_planning, least_step_s, main
from oppo_megatron.config.derived import switched
from oppo_megatron.errors import ConfigError
from tests.unit.test_bench_suite import config as with_critic
from tests.unit.test_bench_suite import without_critic as config

SMALL = Cluster(tp=2, pp=2, response_tokens=64, chunk=16, lengths=(20.0, 0.5), steps=3)


def test_a_row_for_the_first_and_the_last_rank_of_each_size() -> None:
    rows = list(bench_planning(SMALL, ["disaggregated", "colocated"], [8, 16], [16]))
    ranks = [(row["mode"], row["ranks"], row["rank"]) for row in rows]
    assert ranks == [(mode, n, rank) for mode in ("disaggregated", "colocated") for n in (8, 16) for rank in (0, n - 1)]
    for row in rows:
        assert 0 < row["planning"] + row["checking"] + row["bookkeeping"] <= 1.5 * row["total"]
        assert row["percent"] == pytest.approx(100 * row["total"] / row["step_s"])
        assert row["rounds"] >= 2 and row["first"] > 0
        assert row["shapes"] > 0 or row["mode"] == "disaggregated", "woven rounds are planned anew in each step"


def test_a_step_takes_at_least_what_reading_and_computing_take() -> None:
    """Counted by hand: 70.6e9 weights of two bytes in eight parts; operations of some 6 and 18 of them a token's weight."""
    cluster = Cluster(steps=1)
    config = cluster.config("disaggregated", 128, 64)
    reading = least_step_s(config, cluster, 1001, 500.0) - least_step_s(config, cluster, 1, 500.0)
    assert reading == pytest.approx(1000 * 2 * 69.5e9 / 8 / 3.35e12, rel=0.02)
    computing = least_step_s(config, cluster, 0, 500.0)
    assert computing == pytest.approx(64 * 1012 * 69.5e9 * (4 * 2 + 2 * 6) / (128 * 989e12), rel=0.05)


def test_ranks_that_no_layout_fills_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="--ranks 12: disaggregated replicas of tp 2 x pp 2 need a multiple of 8"):
        next(bench_planning(SMALL, ["disaggregated"], [8, 12], [16]))


def test_the_command_counts_what_a_rank_has(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tp", "2", "--pp", "2", "--sequences", "8", "--chunk", "16"]
    assert main(["--count", "--ranks", "8", "64", *sizes]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["disaggregated", "8"], ["disaggregated", "64"]]
    groups, calls, messages, chunks, peers = zip(*(map(int, row[2:]) for row in rows), strict=True)
    assert groups == (15, 16) and calls[0] == 37, "there is a dp group where there are replicas"
    assert chunks == (8, 16) and peers == (5, 9), "a header and a payload to eight listeners, and tokens to one stage"
    assert all((each - chunk) % 16 in (0, 2) for each, chunk in zip(messages, chunks, strict=True)), "two gathers of dp"


def test_a_dry_run_trains_every_prompt_and_forgets_it() -> None:
    base = with_critic(steps=3, overlap={"delta": {"rule": "fixed", "initial": 4}, "chunk": 8})
    for mode in ("sequential", "full", "full+both"):
        dry = DryRun(switched(base, mode), prompt_tokens=5)
        steps = dry.run()
        assert len(steps) == 3 and dry.scheduler.num_consumed == 48
        for part in ("scheduler and buffer", "planner and checker", "stream", "controllers"):
            assert all(step[part] > 0 for step in steps), part
        assert not dry.encoder.ledgers and not dry.decoder.ledgers
        assert all(book.num_open(0) == 0 for book in (dry.planner.actor, *dry.planner.scorers.values()))


@pytest.mark.parametrize("preset", ["dapo", "reinforce_pp"])
def test_a_dry_run_without_scorers(preset: str) -> None:
    steps = DryRun(config(preset), 16).run()
    assert len(steps) == 3 and all(step["planner and checker"] > 0 for step in steps)
