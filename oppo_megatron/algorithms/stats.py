"""Statistics that add up over micro-batches, minibatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True)
class TokenStats:
    """Sums over tokens, each a detached 0-d float64 tensor; a field named `max_...` is a maximum instead.

    `a + b` are the statistics of both parts.  Over ranks: gather `to_vector()` of each and add what `from_vector`
    gives.
    """

    num_tokens: Tensor

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{
                f.name: (torch.maximum if f.name.startswith("max_") else torch.add)(
                    getattr(self, f.name), getattr(other, f.name)
                )
                for f in fields(self)
            }
        )

    def to_vector(self) -> Tensor:
        """All fields in the order of their declaration, float64, shape [number of fields]."""
        return torch.stack([getattr(self, f.name) for f in fields(self)])

    @classmethod
    def from_vector(cls, vector: Tensor) -> Self:
        return cls(*vector.unbind())

    def means(self) -> dict[str, float]:
        """Every sum divided by the number of tokens, and every maximum, by name; `num_tokens` itself is left out."""
        num_tokens = float(self.num_tokens)
        assert num_tokens > 0, "means of no tokens"
        return {
            f.name: float(getattr(self, f.name)) / (1.0 if f.name.startswith("max_") else num_tokens)
            for f in fields(self)
            if f.name != "num_tokens"
        }


def total(x_T: Tensor) -> Tensor:
    """Detached sum in double precision, so that long runs of micro-batches lose nothing."""
    return x_T.detach().sum(dtype=torch.float64)


def count(x_T: Tensor) -> Tensor:
    """Number of tokens as a 0-d float64 tensor on the device of `x_T`."""
    return torch.tensor(float(x_T.numel()), dtype=torch.float64, device=x_T.device)


def maximum(x_T: Tensor) -> Tensor:
    """Detached largest element of non-negative `x_T`; 0 where there is no token (a rank without rows)."""
    return x_T.detach().double().amax() if x_T.numel() else count(x_T)
