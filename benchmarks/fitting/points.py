"""Measured points: CSV files of layers and of collectives, to which the laws' constants are fitted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from oppo_megatron.errors import DataError
from oppo_megatron.layout.shape import Shape

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "send_recv")
PointT = TypeVar("PointT")


@dataclass(frozen=True)
class LayerPoint:
    """A layer over `tokens` tokens on one of `tp` ranks, in microseconds: its four products; two norms, rotations, activation
    and one sum; the sum alone."""

    gpu: str
    model: str
    shape: Shape
    tp: int
    tokens: int
    products_us: float
    elementwise_us: float
    add_us: float


@dataclass(frozen=True)
class CollectivePoint:
    """An operation on `bytes` of each of `ranks` ranks, `ranks_per_node` of them on a node."""

    gpu: str
    operation: str
    ranks: int
    ranks_per_node: int
    bytes: float
    us: float

    @property
    def factor(self) -> float:
        """How many times its bytes pass the wire (nccl-tests, doc/PERFORMANCE.md)."""
        share = (self.ranks - 1) / self.ranks
        return {"all_reduce": 2 * share, "send_recv": 1.0}.get(self.operation, share)


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LAYER_COLUMNS = ("gpu", "model", *SIZES, "tp", "tokens", "products_us", "elementwise_us", "add_us")
COLLECTIVE_COLUMNS = ("gpu", "operation", "ranks", "ranks_per_node", "bytes", "us")


def read_layers(path: Path) -> list[LayerPoint]:
    """Raises DataError, which names file, line and column."""
    return _read(path, LAYER_COLUMNS, _layer)


def read_collectives(path: Path) -> list[CollectivePoint]:
    """Raises DataError, which names file, line and column."""
    return _read(path, COLLECTIVE_COLUMNS, _collective)


def write_layers(path: Path, points: Sequence[LayerPoint]) -> None:
    """As `read_layers` reads them."""
    _write(path, LAYER_COLUMNS, [{**point.shape, **vars(point)} for point in points])


def write_collectives(path: Path, points: Sequence[CollectivePoint]) -> None:
    """As `read_collectives` reads them."""
    _write(path, COLLECTIVE_COLUMNS, [vars(point) for point in points])


def _write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


class _Row:
    """A row that names itself in errors."""

    def __init__(self, path: Path, line: int, values: dict[str, str]):
        self.where, self.values = f"{path}, line {line}", values

    def text(self, column: str) -> str:
        return self.values[column]

    def number(self, column: str) -> float:
        try:
            value = float(self.values[column] or "nothing")
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise DataError(
                f"{self.where}: {column} is {self.values[column]!r}, but must be a positive number; correct it, or leave the "
                "line out"
            )
        return value

    def count(self, column: str) -> int:
        value = self.number(column)
        if value != int(value):
            raise DataError(f"{self.where}: {column} is {value:g}, but must be a whole number; correct it")
        return int(value)


def _layer(row: _Row) -> LayerPoint:
    shape = {"model_type": "llama", **{name: row.count(name) for name in SIZES}}
    times = [row.number(name) for name in ("products_us", "elementwise_us", "add_us")]
    return LayerPoint(row.text("gpu"), row.text("model"), shape, row.count("tp"), row.count("tokens"), *times)


def _collective(row: _Row) -> CollectivePoint:
    operation, ranks = row.text("operation"), row.count("ranks")
    if operation not in OPERATIONS:
        raise DataError(f"{row.where}: operation is {operation!r}, but must be one of {', '.join(OPERATIONS)}; correct it")
    if ranks < 2:
        raise DataError(f"{row.where}: ranks is {ranks}, but nothing passes a wire among fewer than 2; leave the line out")
    return CollectivePoint(row.text("gpu"), operation, ranks, row.count("ranks_per_node"), row.number("bytes"), row.number("us"))


def _read(path: Path, columns: Sequence[str], point: Callable[[_Row], PointT]) -> list[PointT]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: no column {', '.join(missing)}; its first line must name {', '.join(columns)}")
            points = [
                point(_Row(path, number, {name: value or "" for name, value in row.items() if name}))
                for number, row in enumerate(reader, start=2)
            ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: its text is not UTF-8 ({error}); give a CSV file") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; name a CSV file with the columns {', '.join(columns)}") from error
    if not points:
        raise DataError(f"{path} holds no row; give measurements with the columns {', '.join(columns)}")
    return points
