"""How ReaL cuts a model into pipeline stages: contiguous pieces (embedding, layers, head) with the least largest number of
parameters (realhf `partition_pipeline_layers`).  A critic's first stage has fewer layers, the others more than its share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from oppo_megatron.layout.flops import Shape, head_linear, layer_linears


@dataclass(frozen=True)
class Stage:
    """What a stage computes; of the embedding it only looks up rows."""

    layers: int
    has_head: bool


def cut_stages(shape: Shape, pp: int, *, scalar: bool) -> tuple[Stage, ...]:
    """The stages, first to last."""
    layers, layer = shape["num_hidden_layers"], sum(linear.size for linear in layer_linears(shape))
    embedding = head_linear(shape, scalar=False).size
    head = head_linear(shape, scalar=scalar).size
    cuts = least_largest((embedding, *[layer] * layers, head), pp)
    return tuple(
        Stage(min(end, layers + 1) - max(begin, 1), end == layers + 2)
        for begin, end in zip(cuts, cuts[1:], strict=False)
    )


@cache
def least_largest(sizes: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Where to cut `sizes` into contiguous, non-empty parts so that the largest sum is least: `parts` + 1 positions.

    Of several ways, the one whose last parts begin earliest.
    """
    count, sums = len(sizes), [0, *accumulate(sizes)]
    least = [[0 if i == 0 else sums[-1] + 1 for i in range(count + 1)]]
    cut: list[list[int]] = [[0] * (count + 1)]
    for part in range(1, parts + 1):
        least.append([sums[-1] + 1] * (count + 1))
        cut.append([0] * (count + 1))
        for end in range(part, count + 1):
            for begin in range(part - 1, end):
                largest = max(least[part - 1][begin], sums[end] - sums[begin])
                if largest < least[part][end]:
                    least[part][end], cut[part][end] = largest, begin
    ends = [count]
    for part in range(parts, 0, -1):
        ends.append(cut[part][ends[-1]])
    return tuple(reversed(ends))
