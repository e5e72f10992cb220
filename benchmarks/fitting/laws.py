"""The constants of the laws from measured points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fitting.nonnegative import relative_fit
from benchmarks.fitting.points import CollectivePoint, LayerPoint
from oppo_megatron.errors import DataError
from oppo_megatron.sim.clusters.cluster import MOST_POWER, Efficiencies, Gpu, Line
from oppo_megatron.sim.laws import Floats, LayerLaw, LayerSizes

LARGE_TOKENS = 4096
"""From here on a sum of two tensors takes no longer than its bytes do."""
LEAST_POINTS = 8
STEPS = (0.2, 0.1, 0.05, 0.02, 0.01)
START = Efficiencies(0.7, 0.8, 20e-6, 1.4, 0.5, 10e-6, 0.9)


@dataclass(frozen=True)
class Fit:
    """Constants with their mean relative error over the points that they were fitted to."""

    efficiencies: Efficiencies
    products_error: float
    elementwise_error: float
    num_points: int


def fit_layers(gpu: Gpu, points: Sequence[LayerPoint]) -> Fit:
    """`gpu` gives the peaks that the constants are relative to.  Raises DataError if there are too few points."""
    if len(points) < LEAST_POINTS:
        raise DataError(
            f"{len(points)} measured layers are too few to fit 4 constants to; give at least {LEAST_POINTS}, of 1 to some "
            "thousand tokens"
        )
    by_products = fit_products(gpu, points)
    line = fit_elementwise(gpu, points)
    law = LayerLaw(
        replace(
            gpu, efficiencies=replace(by_products, elementwise=line[0], elementwise_fixed_s=line[1], plain=fit_plain(gpu, points))
        )
    )
    return Fit(
        law.gpu.efficiencies,
        mean_error(products_of(law, points), [p.products_us for p in points]),
        mean_error(elementwise_of(law, points), [p.elementwise_us for p in points]),
        len(points),
    )


def fit_products(gpu: Gpu, points: Sequence[LayerPoint]) -> Efficiencies:
    """Compute, memory, fixed seconds and power of the least mean relative error.

    Found by steps along one constant at a time, ever smaller ones; the same points give the same constants.
    """
    measured = np.array([point.products_us for point in points])
    flops, num_bytes = _product_sizes(points)

    def error(by: Efficiencies) -> float:
        compute, memory = flops / (by.compute * gpu.flops), num_bytes / (by.memory * gpu.bytes_per_s)
        seconds = (compute**by.power + memory**by.power) ** (1 / by.power) + by.fixed_s
        return float(np.mean(np.abs(1e6 * seconds / measured - 1)))

    best, least = START, error(START)
    for step in STEPS:
        best, least = _descend(best, least, step, error)
    return best


def _descend(best: Efficiencies, least: float, step: float, error: Callable[[Efficiencies], float]) -> tuple[Efficiencies, float]:
    moved = True
    while moved:
        moved = False
        for name in ("compute", "memory", "fixed_s", "power"):
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(best, name) * factor
                if name == "power":
                    value = min(max(1.0, value), MOST_POWER)
                elif name != "fixed_s":
                    value = min(value, 2.0)  # as the file of constants has it
                changes: Mapping[str, Any] = {name: value}
                candidate = replace(best, **changes)
                if (found := error(candidate)) < least - 1e-9:
                    best, least, moved = candidate, found, True
    return best, least


def fit_elementwise(gpu: Gpu, points: Sequence[LayerPoint]) -> tuple[float, float]:
    """Share of the memory's peak, and fixed seconds."""
    num_bytes = np.array([_elementwise_bytes(point) for point in points])
    seconds = 1e-6 * np.array([point.elementwise_us for point in points])
    fixed, per_byte = relative_fit(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), seconds, np.zeros_like(seconds))
    if per_byte <= 0:
        raise DataError("elementwise_us does not grow with the tokens; measure from 1 to some thousand tokens")
    return float(1 / (per_byte * gpu.bytes_per_s)), float(fixed)


def fit_plain(gpu: Gpu, points: Sequence[LayerPoint]) -> float:
    """The median share of the memory's peak that a sum of two large tensors reaches."""
    large = [point for point in points if point.tokens >= LARGE_TOKENS] or [max(points, key=lambda p: p.tokens)]
    shares = [6 * p.shape["hidden_size"] * p.tokens / (1e-6 * p.add_us) / gpu.bytes_per_s for p in large]
    return float(np.median(shares))


def fit_line(points: Sequence[CollectivePoint]) -> tuple[Line, float]:
    """A line through points of one operation and number of ranks, by relative error; and its mean relative error."""
    wire = np.array([point.factor * point.bytes for point in points])
    seconds = 1e-6 * np.array([point.us for point in points])
    features = np.stack([np.ones_like(wire), wire], axis=1)
    alpha, per_byte = relative_fit(features, seconds, np.zeros_like(seconds))
    if len(set(wire.tolist())) < 2 or per_byte <= 0:
        first = points[0]
        raise DataError(
            f"{first.operation} of {first.ranks} ranks: {len(points)} points do not say what a byte costs; measure several "
            "sizes, from some KiB to some hundred MiB"
        )
    line = Line(float(alpha), float(1 / per_byte))
    return line, mean_error(1e6 * (alpha + wire * per_byte), [p.us for p in points])


def products_of(law: LayerLaw, points: Sequence[LayerPoint]) -> Floats:
    """Microseconds by law."""
    return 1e6 * np.array([law.products_s(LayerSizes.of(p.shape, p.tp), float(p.tokens)) for p in points])


def elementwise_of(law: LayerLaw, points: Sequence[LayerPoint]) -> Floats:
    """Microseconds by law, of one sum as measured."""
    return 1e6 * np.array([law.elementwise_s(LayerSizes.of(p.shape, p.tp), float(p.tokens), sums=1) for p in points])


def mean_error(predicted: Floats, measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted / np.array(measured) - 1)))


def _product_sizes(points: Sequence[LayerPoint]) -> tuple[Floats, Floats]:
    sizes = [(LayerSizes.of(point.shape, point.tp), float(point.tokens)) for point in points]
    flops = np.array([size.product_flops(tokens) for size, tokens in sizes])
    return flops, np.array([size.product_bytes(tokens) for size, tokens in sizes])


def _elementwise_bytes(point: LayerPoint) -> float:
    return LayerSizes.of(point.shape, point.tp).elementwise_bytes(float(point.tokens), sums=1)
