"""Run on gloo ranks by test_gathering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from oppo_megatron.chunks import ChunkRow, ChunkRows
from oppo_megatron.cluster.process_groups import gather_figures
from oppo_megatron.engine.stream import gather_rows
from tests.support.traffic import Traffic


def gather(
    rounds: Sequence[Sequence[Sequence[ChunkRow]]], figures: Sequence[Mapping[str, float]]
) -> tuple[list[list[ChunkRow]], list[dict[str, float]], Traffic]:
    """The rows of each round and the figures, each of which names by rank what that rank has; and what a rank sends for it."""
    rank, group, traffic = dist.get_rank(), dist.group.WORLD, Traffic()
    assert group is not None
    with traffic.watched(), traffic.counting():
        rows = [list(gather_rows(ChunkRows.of(by_rank[rank]), group)) for by_rank in rounds]
        return rows, gather_figures(figures[rank], group), traffic
