"""The table of `--dry-run` and `oppo validate`: each rank's roles, memory and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from oppo_megatron.cli.measure import on_cpu
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.layout.memory import Memory
from oppo_megatron.layout.role_memory import Holding, rank_memory, supervised_holdings, train_holdings

Row = tuple[str, ...]
MEMORY_HEADINGS: Row = (
    "rank", "role", "tp", "pp", "dp", "layers",
    "weights", "copy", "packed", "kernels", "grads", "Adam", "KV", "buffers", "activations", "total",
)  # fmt: skip
BATCH_HEADINGS: Row = (
    "rollout batch B", "B + delta", "sequences a replica", "KV slots", "decode m-batches", "minibatch rows", "rows a batch",
    "rows a replica", "micro-batch tokens", "chunk C", "prefill tokens",
)  # fmt: skip
"""All batch sizes, in column order; unused columns are left out."""
MEBIBYTE = 2**20


def rank_table(config: TrainConfig | SupervisedConfig) -> list[str]:
    """Memory, then batch sizes, with a row per rank and one per role below it."""
    on_host = on_cpu(config.runtime.device)
    if isinstance(config, TrainConfig):
        holdings = train_holdings(config, on_cpu=on_host)
    else:
        holdings = supervised_holdings(config, on_cpu=on_host)
    memory, totals = [MEMORY_HEADINGS], rank_memory(holdings)
    for rank, group in groupby(holdings, key=lambda holding: holding.rank):
        held = list(group)
        if len(held) > 1:
            memory.append((str(rank), "all", "", "", "", "", *_mebibytes(totals[rank])))
        memory += [("" if len(held) > 1 else str(rank), *_share(each), *_mebibytes(each.memory)) for each in held]
    return [
        "Memory of each rank in MiB, without interpreter, libraries and a GPU's context (copy: weights of a training layout of",
        "its own; packed: weights laid out for a CPU's products, kernels: what those keep; buffers: rotary tables and what",
        "sequence parallelism gathers; activations: of the largest micro-batch of the update or of cached calls; roles compute",
        "in turn, so of kernels and activations a rank's total has the largest only):",
        *_aligned(memory),
        "Batch sizes (rows: of an optimizer step; m-batches: micro-batches; auto: as the measured times decide):",
        *_aligned(_batch_rows(holdings)),
    ]


def _share(held: Holding) -> Row:
    """The role, its part of each kind of parallelism, from 1: `tp 1/2`, and its layers."""
    coords, sizes = held.coords, held.sizes
    parts = ((coords.shard, sizes.tp), (coords.stage, sizes.pp), (coords.replica, sizes.dp))
    layers = ",".join(f"{c.start + 1}-{c.stop}" if len(c) > 1 else str(c.stop) for c in held.layers)
    return held.role, *(f"{part + 1}/{count}" for part, count in parts), layers


def _mebibytes(memory: Memory) -> Row:
    found = [size / MEBIBYTE for size in (*vars(memory).values(), memory.total)]
    return tuple("-" if size == 0 else f"{size:.2f}" if size < 100 else f"{size:.0f}" for size in found)


def _batch_rows(holdings: Sequence[Holding]) -> list[Row]:
    """Two lines of headings, split at their last space, then rows per role; equal ranks share them."""
    used = [heading for heading in BATCH_HEADINGS if any(heading in held.batches for held in holdings)]
    words = [heading.rpartition(" ") for heading in used]
    rows: list[Row] = [("", "", *(first for first, _, _ in words)), ("rank", "role", *(last for _, _, last in words))]
    ranks_of: dict[tuple[Row, ...], list[int]] = {}
    for rank, group in groupby(holdings, key=lambda holding: holding.rank):
        own = tuple((held.role, *(held.batches.get(heading, "-") for heading in used)) for held in group)
        ranks_of.setdefault(own, []).append(rank)
    for own, ranks in ranks_of.items():
        rows += [("" if index else format_ranks(ranks), *row) for index, row in enumerate(own)]
    return rows


def _aligned(rows: Sequence[Row]) -> list[str]:
    """Align columns two spaces apart, names left and numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i == 1 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
