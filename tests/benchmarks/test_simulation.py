"""A round that every rank plans for itself: sound if all plan alike; a rank that does not is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.dry_run import Cluster
from benchmarks.planning import main
from benchmarks.rank_run import RankRun
from benchmarks.simulation import Simulated, simulate_rounds
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.schedule.checking.checker import FaultKind

CLUSTER = Cluster(tp=2, pp=2, response_tokens=64, chunk=16, lengths=(20.0, 0.5), steps=1)
PROMPT = 24
ROUND = 2
MODES = ["disaggregated", "colocated"]


def played(config: TrainConfig, odd: Callable[[int], RankRun] | None = None, rank: int = -1, number: int = ROUND) -> Simulated:
    def make_run(each: int) -> RankRun:
        return odd(each) if odd is not None and each == rank else RankRun(config, PROMPT, each)

    (simulated,) = simulate_rounds(config, make_run, number, number)
    return simulated


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [8, 32])
def test_ranks_that_plan_alike_have_a_sound_round(mode: str, ranks: int) -> None:
    config = CLUSTER.config(mode, ranks, 16)
    rounds = list(simulate_rounds(config, lambda rank: RankRun(config, PROMPT, rank), 1, 3))
    assert [simulated.faults for simulated in rounds] == [[], [], []]
    assert [simulated.round.index for simulated in rounds] == [1, 2, 3]
    for simulated in rounds:
        assert sorted(simulated.schedule.actions) == list(range(ranks))
        assert simulated.chain >= 2 * simulated.round.steps, "to the last stage and back, in each decode step"


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_with_other_lengths_is_named(mode: str) -> None:
    config = CLUSTER.config(mode, 8, 8)
    own = RankRun(config, PROMPT, 0)
    ended = next(seq_id for seq_id in range(8) if own.limit(seq_id) <= CLUSTER.chunk)

    def odd(rank: int) -> RankRun:
        return RankRun(config, PROMPT, rank, lambda seq_id: own.limit(seq_id) - (seq_id == ended))

    for rank in range(8):
        faults = played(config, odd, rank).faults
        assert [(fault.kind, fault.rank) for fault in faults if "other records" in fault.message] == [(FaultKind.PLAN, rank)]
        assert f"of sequence {ended}, " in faults[0].message


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_with_another_configuration_is_named_and_its_peers_wait(mode: str) -> None:
    config, other = CLUSTER.config(mode, 8, 8), replace(CLUSTER, chunk=8).config(mode, 8, 8)
    for rank in (0, 3, 7):
        simulated = played(config, lambda each: RankRun(other, PROMPT, each), rank, number=1)
        plans = [fault.rank for fault in simulated.faults if fault.kind == FaultKind.PLAN]
        kinds = {fault.kind for fault in simulated.faults}
        told = "plans round 1 with 8 decode steps, most others round 1 with 16"
        assert plans[0] == rank and told in simulated.faults[0].message
        decodes = mode == "colocated" or rank < 4
        assert not decodes or {FaultKind.DEADLOCK, FaultKind.MISSING} <= kinds
        assert any(fault.rank != rank for fault in simulated.faults) == decodes


def test_ends_that_expect_other_sizes_are_found() -> None:
    config = CLUSTER.config("disaggregated", 8, 8)
    own = RankRun(config, PROMPT, 0)
    running = next(seq_id for seq_id in range(8) if own.limit(seq_id) > CLUSTER.chunk)

    def odd(rank: int) -> RankRun:
        return RankRun(config, PROMPT, rank, lambda seq_id: 3 if seq_id == running else own.limit(seq_id))

    faults = played(config, odd, 1, number=1).faults
    assert {fault.kind for fault in faults} == {FaultKind.PLAN}
    assert faults and all("rank 1 sends" in f.message or f.rank == 1 for f in faults)


def test_the_command_prints_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by hand: each shard sends a hidden state and a token per decode step, and one for scorers; listeners get two."""
    sizes = ["--tp", "2", "--pp", "2", "--sequences", "8", "--chunk", "16"]
    assert main(["--simulate", "--ranks", "8", "16", *sizes]) == 0
    out, err = capsys.readouterr()
    heads, *rows = [line.split() for line in out.splitlines()[:3]]
    assert heads[:6] == ["mode", "ranks", "round", "actions", "chain", "messages"]
    expected = [[str(8 * n), "2", str(n * (2 * (2 * 16 + 3) + 4 * 2))] for n in (1, 2)]
    assert [[row[1], row[2], row[5]] for row in rows] == expected
    assert out.splitlines()[-1] == "OK: all ranks have planned the same round, and the checker finds no fault in it"
    assert err.splitlines()[-1].startswith("disaggregated: 16 of 16 ranks have planned, ")
