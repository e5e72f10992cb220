"""Comparisons with an oracle: losses, gradients and advantages are the same to rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.batches import Sample, gradients
from tests.oracles.implementations import IMPLEMENTATIONS, Implementation
from tests.replay.formulas import Rows
from tests.replay.recipe import Recipe

TOLERANCE = 1e-6
"""Absolute, and relative to a number above 1."""


def cases(recipes: dict[str, Recipe]) -> pytest.MarkDecorator:
    found = [
        pytest.param(implementation, name, id=f"{implementation.name}-{name}")
        for name, recipe in recipes.items()
        for implementation in IMPLEMENTATIONS
        if implementation.has(recipe)
    ]
    return pytest.mark.parametrize(("ours", "name"), found)


def advantages_for(implementation: Implementation, sample: Sample, recipe: Recipe) -> list[Tensor]:
    return [row.detach() for row in implementation.advantages(sample.batch, recipe)]


def assert_close(ours: Tensor, theirs: Tensor, **about: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda text: f"{about}: {text}")


def assert_rows_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], **about: Any) -> None:
    assert_close(torch.cat(list(ours)), torch.cat(list(theirs)), **about)


def assert_same_loss(ours: Tensor, theirs: Tensor, tokens: Rows, **about: Any) -> None:
    assert_close(ours.detach(), theirs.detach(), **about)
    assert_close(gradients(ours, tokens), gradients(theirs, tokens), **about)
