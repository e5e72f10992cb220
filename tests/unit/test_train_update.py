"""How an update is cut: each row once an epoch, within the token budget, and the figures that say how well it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.training import StepReport
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.train.update import UpdateSettings, run_update, update_packing

CPU = torch.device("cpu")


@dataclass
class Groups:
    dp: int
    dp_rank: int


@dataclass
class Recorder:
    """In the place of a trained model: keeps what it is given."""

    groups: Groups
    steps: list[list[MicroBatch]] = field(default_factory=list)

    @property
    def model(self) -> Recorder:
        return self

    def step(self, batches: list[MicroBatch], loss: Any) -> StepReport:
        self.steps.append(batches)
        return StepReport(0.0, 0.0, {})


def rollouts(lengths: list[tuple[int, int]]) -> list[Rollout]:
    """Of so many prompt and response tokens; each response token is its rollout's number."""
    return [Rollout(Prompt(i, i, "", (0,) * prompt), i, tokens=[i] * response) for i, (prompt, response) in enumerate(lengths)]


def side_by_side(rows: Sequence[int]) -> list[list[int]]:
    """Pairs of rows."""
    return [list(rows[place : place + 2]) for place in range(0, len(rows), 2)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    replicas=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    budget=st.integers(18, 40),
)
def test_the_figures_are_those_of_what_is_trained(
    lengths: list[tuple[int, int]], replicas: int, minibatches: int, budget: int
) -> None:
    batch, cut = rollouts(lengths), UpdateSettings(2, minibatches, budget, seed=4, step=3, device=CPU)
    recorders = [Recorder(Groups(replicas, rank)) for rank in range(replicas)]
    for recorder in recorders:
        run_update(recorder, batch, {}, None, cut)
    micros = [micro for recorder in recorders for step in recorder.steps for micro in step]
    assert all(len(micro.tokens_T) <= budget for micro in micros)
    trained = torch.cat([micro.targets_R for micro in micros]).bincount(minlength=len(batch)).tolist()
    assert trained == [2 * len(rollout.tokens) for rollout in batch], "every response token once in each epoch"
    tokens, padded = sum(len(micro.tokens_T) for micro in micros), 0
    for step in zip(*(recorder.steps for recorder in recorders), strict=True):
        rows = [length for replica in step for micro in replica for length in micro.lengths]
        padded += len(rows) * max(rows)
    assert update_packing(batch, replicas, cut) == {
        "packing_efficiency": pytest.approx(tokens / (len(micros) * budget)),
        "padding_saved": pytest.approx(1 - tokens / padded),
    }


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=16).filter(lambda x: len(x) % 2 == 0),
    replicas=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    budget=st.integers(34, 60),
)
def test_a_pair_is_in_one_micro_batch_of_one_replica(
    lengths: list[tuple[int, int]], replicas: int, minibatches: int, budget: int
) -> None:
    """Side by side, and memory that runs out is told of pairs; the figures of packing are those of pairs."""
    batch, cut = rollouts(lengths), UpdateSettings(1, minibatches, budget, seed=4, step=3, device=CPU, group_size=2)
    recorders = [Recorder(Groups(replicas, rank)) for rank in range(replicas)]

    numbers_T = torch.cat([torch.full((len(rollout.tokens),), i) for i, rollout in enumerate(batch)])
    for recorder in recorders:
        run_update(recorder, batch, {"numbers": numbers_T}, None, cut, units=side_by_side)
    micros = [micro for recorder in recorders for step in recorder.steps for micro in step]
    assert all(len(micro.tokens_T) <= budget and len(micro.lengths) == 2 * len(micro.index) for micro in micros)
    assert all(torch.equal(micro.extra["numbers"], micro.targets_R) for micro in micros), "each row has its own numbers"
    found = []
    for micro in micros:
        rows = [int(part[0]) for part in micro.targets_R.split(list(micro.counts))]
        found += side_by_side(rows)
    assert sorted(found) == side_by_side(range(len(batch)))
    tokens = sum(len(micro.tokens_T) for micro in micros)
    packing = update_packing(batch, replicas, cut, units=side_by_side)
    assert packing["packing_efficiency"] == pytest.approx(tokens / (len(micros) * budget))
