"""Rows and figures that ranks tell each other arrive to the bit, and nothing of them is pickled."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from oppo_megatron.chunks import ChunkRow, ChunkRows
from oppo_megatron.cluster.process_groups import gather_figures
from oppo_megatron.engine.stream import gather_rows
from tests.support.ranks import run_ranks
from tests.support.traffic import Traffic


def gather(
    rounds: Sequence[Sequence[Sequence[ChunkRow]]], figures: Sequence[Mapping[str, float]]
) -> tuple[list[list[ChunkRow]], list[dict[str, float]], Traffic]:
    rank, group, traffic = dist.get_rank(), dist.group.WORLD, Traffic()
    assert group is not None
    with traffic.watched(), traffic.counting():
        rows = [list(gather_rows(ChunkRows.of(by_rank[rank]), group)) for by_rank in rounds]
        return rows, gather_figures(figures[rank], group), traffic


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def test_rows_and_figures_of_all_ranks_arrive_to_the_bit() -> None:
    odd = [-0.0, -5e-324, -math.inf, math.nextafter(-1.0, 0.0)]
    first = [
        [ChunkRow(7, 3, [5, 2**31, 0, 1], odd, odd[::-1], 4, 19, "eos"), ChunkRow(9, 0, [], [], [], 4)],
        [],
        [ChunkRow(2, 11, [8], [-0.1], [-0.2], 3, 16, "stop"), ChunkRow(3, 0, [1, 1], [0.0, -1.0], [-3.0, 0.1], 4)],
    ]
    nothing: list[list[ChunkRow]] = [[], [], []]
    figures: list[dict[str, float]] = [{"loss": 0.1 + 0.2, "max_ratio": math.inf}, {}, {"b": -0.0, "a": 5e-324}]
    answers: Any = run_ranks(3, "tests.gloo.test_gathering:gather", rounds=[first, nothing], figures=figures)
    for (rows, none), found, traffic in answers:
        assert rows == [row for own in first for row in own] and none == []
        assert bits(rows[0].logprobs) == bits(odd) and bits(rows[0].sampling_logprobs) == bits(odd[::-1])
        assert found == figures and bits([found[2]["b"]]) == bits([-0.0]) and list(found[2]) == ["b", "a"]
        assert traffic.calls == {"all_gather": 6} and traffic.pickled == 0
