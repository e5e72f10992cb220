"""What roles whose sequences are alike ask for, made once.  Pure.

Scorers of one layout are given the same sequences, and most of them read as many tokens: what one of them has been given the
next asks for again, in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

T = TypeVar("T")

KEPT = 8
"""Answers that are kept: some for each role, of one round."""


class Alike:
    """The last answers of pure functions of whole numbers and arrays of these.  Nobody changes an answer."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], object] = {}

    def once(self, make: Callable[..., T], *asked: object) -> T:
        """`make(*asked)`, or what it gave for the same before."""
        key = make, *((each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in asked)
        if key not in self._known:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]  # the oldest
            self._known[key] = make(*asked)
        return cast(T, self._known[key])
