"""Sources of constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["measured", "published", "assumed", "given"]


@dataclass(frozen=True)
class Source:
    """`measured` by the user, `published` by others, `given` as a number in cluster.yaml, or else `assumed`."""

    kind: Kind
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


def published(where: str) -> Source:
    return Source("published", where)


def assumed(where: str) -> Source:
    return Source("assumed", where)


def measured(where: str) -> Source:
    return Source("measured", where)
