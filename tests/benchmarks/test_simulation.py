"""A round that every rank plans for itself: sound where all plan alike, and whoever does not is found and named.

That messages and bytes are those of real runs shows `tests/e2e/test_executed_order.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from benchmarks.dry_run import Cluster
from benchmarks.planning import main
from benchmarks.rank_run import RankRound, RankRun
from benchmarks.simulation import Simulated, simulate_all, simulate_rounds
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.schedule.actions import Payload
from oppo_megatron.schedule.checking.checker import FaultKind

CLUSTER = Cluster(tp=2, pp=2, response_tokens=64, chunk=16, lengths=(20.0, 0.5), steps=1)
PROMPT = 24
ROUND = 2
MODES = ["disaggregated", "colocated"]


def played(
    config: TrainConfig, odd: Callable[[int], RankRun] | None = None, rank: int = -1, number: int = ROUND
) -> Simulated:
    """The round, in which `rank` is what `odd` makes of it."""

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
    """It takes one response to end a token sooner, in the round before: each rank in turn."""
    config = CLUSTER.config(mode, 8, 8)
    own = RankRun(config, PROMPT, 0)
    ended = next(seq_id for seq_id in range(8) if own.limit(seq_id) <= CLUSTER.chunk)

    def odd(rank: int) -> RankRun:
        return RankRun(config, PROMPT, rank, lambda seq_id: own.limit(seq_id) - (seq_id == ended))

    for rank in range(8):
        faults = played(config, odd, rank).faults
        assert [(fault.kind, fault.rank) for fault in faults if "other records" in fault.message] == [
            (FaultKind.PLAN, rank)
        ]
        assert f"of sequence {ended}, " in faults[0].message


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_with_another_configuration_is_named_and_its_peers_wait(mode: str) -> None:
    """It decodes chunks of half the length: all others wait for tokens or for its hidden states."""
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


def test_a_rank_that_packs_otherwise_is_named() -> None:
    """A scorer with a smaller budget of tokens has more micro-batches than its tensor rank and the other stage."""
    config = CLUSTER.config("disaggregated", 8, 8)
    other = config.model_copy(update={"runtime": config.runtime.model_copy(update={"micro_batch_tokens": 100})})
    simulated = played(config, lambda rank: RankRun(other, PROMPT, rank), 6)
    assert [(f.kind, f.rank) for f in simulated.faults if f.kind == FaultKind.PLAN][:1] == [(FaultKind.PLAN, 6)]
    assert "other micro-batches of reference replica 0 than its peers" in simulated.faults[0].message
    assert {FaultKind.FOREIGN, FaultKind.DEADLOCK} <= {fault.kind for fault in simulated.faults}


def test_ends_that_expect_other_sizes_are_found() -> None:
    """A rank that takes a response to end within the round: its plan is that of its peers, its messages are shorter."""
    config = CLUSTER.config("disaggregated", 8, 8)
    own = RankRun(config, PROMPT, 0)
    running = next(seq_id for seq_id in range(8) if own.limit(seq_id) > CLUSTER.chunk)

    def odd(rank: int) -> RankRun:
        return RankRun(config, PROMPT, rank, lambda seq_id: 3 if seq_id == running else own.limit(seq_id))

    faults = played(config, odd, 1, number=1).faults
    assert {fault.kind for fault in faults} == {FaultKind.PLAN}
    assert faults and all("rank 1 sends" in f.message or f.rank == 1 for f in faults)


class Swapped(RankRun):
    """Takes the tokens of the first two steps in the other order."""

    def rank_rounds(self) -> Iterator[RankRound]:
        for made in super().rank_rounds():
            own = list(made.plan.actions)
            first, second, *_ = [at for at, action in enumerate(own) if action.payload is Payload.TOKENS]
            own[first], own[second] = own[second], own[first]
            yield replace(made, plan=replace(made.plan, actions=tuple(own)))


def test_lists_are_played_as_they_are() -> None:
    """One that differs from its plan: the checker says what it leads to."""
    config = CLUSTER.config("disaggregated", 8, 8)
    simulated = played(config, lambda rank: Swapped(config, PROMPT, rank), 0)
    assert simulated.faults and simulated.faults[0].kind != FaultKind.PLAN
    assert {0, 2} & {fault.rank for fault in simulated.faults}, "rank 2 sends it the tokens"


def test_a_round_that_the_step_does_not_have() -> None:
    config = CLUSTER.config("disaggregated", 8, 8)
    with pytest.raises(ConfigError, match="round 99: rank 0 has [0-9]+; ask for one of these"):
        played(config, number=99)


def test_the_command_prints_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: each shard sends a hidden state and a token in each of 16 decode steps, and a hidden state of a micro-batch of
    three scorers; the four ranks that listen get a header and a payload each."""
    sizes = ["--tp", "2", "--pp", "2", "--sequences", "8", "--chunk", "16"]
    assert main(["--simulate", "--ranks", "8", "16", *sizes]) == 0
    out, err = capsys.readouterr()
    heads, *rows = [line.split() for line in out.splitlines()[:3]]
    assert heads[:6] == ["mode", "ranks", "round", "actions", "chain", "messages"]
    expected = [[str(8 * n), "2", str(n * (2 * (2 * 16 + 3) + 4 * 2))] for n in (1, 2)]
    assert [[row[1], row[2], row[5]] for row in rows] == expected
    assert out.splitlines()[-1] == "OK: all ranks have planned the same round, and the checker finds no fault in it"
    assert err.splitlines()[-1].startswith("disaggregated: 16 of 16 ranks have planned, ")


def test_the_command_finds_a_fault_that_it_plants(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tp", "2", "--pp", "2", "--sequences", "8", "--chunk", "16"]
    assert main(["--simulate", "--ranks", "8", "--odd", "3", *sizes]) == 2
    told = capsys.readouterr().out.partition("the simulation finds 1 fault:\n")[2].splitlines()
    assert told[0].startswith("  - rank 3, action ") and ", plan: it has other records of 8 sequences " in told[0]
    assert not any(", plan: it has other records" in line for line in told[1:])


def test_a_rank_that_is_not_there_cannot_be_odd() -> None:
    with pytest.raises(ConfigError, match="--odd 8: 8 ranks are 0 to 7; name one of these"):
        next(simulate_all(CLUSTER, ["disaggregated"], [16, 8], 8, 1, print, odd=8))
