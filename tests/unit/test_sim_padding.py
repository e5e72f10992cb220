"""Padded runs in virtual time: as sequential ones whose every response is as long as its batch's longest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oppo_megatron.config.modes import switched
from oppo_megatron.sim.runs.padding import Padding
from oppo_megatron.sim.runs.sources import built_in_costs
from oppo_megatron.sim.runs.virtual import VirtualRun, VirtualStep
from tests.unit.test_sim_search_plan import config

ROWS = 32
LONGEST = {0: 90, 1: 31, 2: 64}


def own(seq_id: int) -> int:
    """Batches with another longest response each, which is not their first."""
    batch, place = divmod(seq_id, ROWS)
    return LONGEST[batch % 3] if place == 7 else 1 + place % 30


def test_every_response_is_computed_to_its_batchs_longest() -> None:
    sequential = switched(config(), "sequential")
    costs = built_in_costs(sequential, 16)

    def steps(lengths: Callable[[int], int]) -> list[VirtualStep]:
        return list(VirtualRun(sequential, costs, lengths, prompt_tokens=16, endless=True).steps(3))

    padding = Padding(own, ROWS)
    padded, plain = steps(padding.padded), steps(own)
    full = steps(lambda seq_id: LONGEST[seq_id // ROWS % 3])
    assert [step.step_s for step in padded] == [step.step_s for step in full]
    for batch, (wide, narrow) in enumerate(zip(map(padding.unpadded, padded), plain, strict=True)):
        assert wide.step_s > narrow.step_s
        assert wide.tokens == narrow.tokens == sum(map(own, range(batch * ROWS, batch * ROWS + ROWS)))
        assert wide.lengths.tolist() == [own(seq_id) for seq_id in wide.seq_ids.tolist()]


@pytest.mark.parametrize("seq_id", [0, 7, 31, 32, 95, 96])
def test_no_response_is_cut(seq_id: int) -> None:
    assert Padding(own, ROWS).padded(seq_id) >= own(seq_id)
