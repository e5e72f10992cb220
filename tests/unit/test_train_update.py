"""Cutting an update: each row once an epoch, within the token budget, and the figures of how well it is packed."""

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
from oppo_megatron.train.update import UpdateSettings, each_alone, run_update, update_packing

CPU = torch.device("cpu")


@dataclass
class Groups:
    dp: int
    dp_rank: int


@dataclass
class Recorder:
    """Stands for a trained model: keeps what it is given."""

    groups: Groups
    steps: list[list[MicroBatch]] = field(default_factory=list)

    @property
    def model(self) -> Recorder:
        return self

    def step(self, batches: list[MicroBatch], loss: Any) -> StepReport:
        self.steps.append(batches)
        return StepReport(0.0, 0.0, {})


def rollouts(lengths: list[tuple[int, int]]) -> list[Rollout]:
    """Rollouts of so many prompt and response tokens; each response token is its rollout's number."""
    return [Rollout(Prompt(i, i, "", (0,) * prompt), i, tokens=[i] * response) for i, (prompt, response) in enumerate(lengths)]


def no_loss(*args: Any, **named: Any) -> Any:
    """The recorder asks for no loss."""


def side_by_side(rows: Sequence[int]) -> list[list[int]]:
    return [list(rows[place : place + 2]) for place in range(0, len(rows), 2)]


@settings(deadline=None, max_examples=120)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    paired=st.booleans(),
    replicas=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    budget=st.integers(34, 60),
)
def test_an_update_reads_each_row_once_within_the_budget(
    lengths: list[tuple[int, int]], paired: bool, replicas: int, minibatches: int, budget: int
) -> None:
    size, units = (2, side_by_side) if paired else (1, each_alone)
    batch, cut = rollouts(lengths * size), UpdateSettings(2, minibatches, budget, 4, step=3, device=CPU, group_size=size)
    recorders = [Recorder(Groups(replicas, rank)) for rank in range(replicas)]
    numbers_T = torch.cat([torch.full((len(rollout.tokens),), i) for i, rollout in enumerate(batch)])
    for recorder in recorders:
        run_update(recorder, batch, {"numbers": numbers_T}, no_loss, cut, units=units)
    micros = [micro for recorder in recorders for step in recorder.steps for micro in step]
    assert all(len(micro.tokens_T) <= budget and len(micro.lengths) == size * len(micro.index) for micro in micros)
    assert all(torch.equal(micro.extra["numbers"], micro.targets_R) for micro in micros), "each row has its own numbers"
    found = [units([int(part[0]) for part in micro.targets_R.split(list(micro.counts))]) for micro in micros]
    assert sorted(unit for each in found for unit in each) == sorted(2 * units(range(len(batch)))), "once in each epoch"
    packing = update_packing(batch, replicas, cut, units=units)
    tokens, padded = sum(len(micro.tokens_T) for micro in micros), 0
    assert packing["packing_efficiency"] == pytest.approx(tokens / (len(micros) * budget))
    for step in zip(*(recorder.steps for recorder in recorders), strict=True):
        rows = [length for replica in step for micro in replica for length in micro.lengths]
        padded += len(rows) * max(rows)
    assert paired or packing["padding_saved"] == pytest.approx(1 - tokens / padded)
