"""Compare measured points with the laws, and with constants fitted to these points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fitting.laws import Fit, elementwise_of, fit_line, mean_error, products_of
from benchmarks.fitting.points import CollectivePoint, LayerPoint
from oppo_megatron.sim.clusters.cluster import Gpu, Inside, Line
from oppo_megatron.sim.laws import LayerLaw

COLUMNS = {
    "what": "what", "points": "points", "law, error %": "law_error_percent", "fitted, error %": "fitted_error_percent",
}  # fmt: skip


@dataclass(frozen=True)
class FittedLine:
    """The fitted line of one operation among `ranks` ranks of a node."""

    operation: str
    ranks: int
    line: Line
    error: float


def fit_lines(points: Sequence[CollectivePoint]) -> list[FittedLine]:
    """Fit a line per operation and number of ranks in a node.  Raises DataError if the points do not show a byte's cost."""
    within = [point for point in points if _within(point)]
    return [
        FittedLine(*key, *fit_line([point for point in within if _key(point) == key]))
        for key in sorted({_key(point) for point in within})
    ]


def compare_layers(gpu: Gpu, points: Sequence[LayerPoint], fit: Fit) -> Iterator[dict[str, Any]]:
    """Yield a row per model and part: the error of the laws of `gpu`, and of the fit."""
    law, fitted = LayerLaw(gpu), LayerLaw(replace(gpu, efficiencies=fit.efficiencies))
    for model in sorted({point.model for point in points}):
        of_model = [point for point in points if point.model == model]
        products, elementwise = [p.products_us for p in of_model], [p.elementwise_us for p in of_model]
        by_law, by_fit = products_of(law, of_model), products_of(fitted, of_model)
        yield _row(f"{model}: products", products, mean_error(by_law, products), mean_error(by_fit, products))
        by_law, by_fit = elementwise_of(law, of_model), elementwise_of(fitted, of_model)
        yield _row(
            f"{model}: norms, activation, ...", elementwise, mean_error(by_law, elementwise), mean_error(by_fit, elementwise)
        )


def compare_collectives(
    inside: Inside, points: Sequence[CollectivePoint], fits: Iterable[FittedLine]
) -> Iterator[dict[str, Any]]:
    """A row for each operation and number of ranks within a node."""
    for fit in fits:
        chosen = [point for point in points if _within(point) and _key(point) == (fit.operation, fit.ranks)]
        law = inside.send if fit.operation == "send_recv" else inside.of_ranks(fit.ranks)
        by_law = np.array([1e6 * law.seconds(point.bytes, point.factor) for point in chosen])
        measured = [point.us for point in chosen]
        yield _row(f"{fit.operation} of {fit.ranks}", measured, mean_error(by_law, measured), fit.error)


def measured_tree(source: str, layers: Fit | None, lines: Sequence[FittedLine]) -> dict[str, Any]:
    """Return the tree that `measured` of cluster.yaml reads, to be written as JSON."""
    collective = {str(fit.ranks): _line_tree(fit.line) for fit in lines if fit.operation == "all_reduce"}
    sends = [_line_tree(fit.line) for fit in lines if fit.operation == "send_recv"]
    efficiencies = None
    if layers is not None:
        efficiencies = {name: value for name, value in vars(layers.efficiencies).items() if name != "attention"}
    return {"source": source, "efficiencies": efficiencies, "collective": collective, "send": sends[0] if sends else None}


def _row(what: str, measured: Sequence[float], law: float, fitted: float) -> dict[str, Any]:
    return {"what": what, "points": len(measured), "law_error_percent": 100 * law, "fitted_error_percent": 100 * fitted}


def _line_tree(line: Line) -> dict[str, float]:
    return {"alpha_s": line.alpha_s, "bytes_per_s": line.bytes_per_s}


def _key(point: CollectivePoint) -> tuple[str, int]:
    return point.operation, point.ranks


def _within(point: CollectivePoint) -> bool:
    return point.ranks == point.ranks_per_node
