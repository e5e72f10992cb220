"""The random numbers of `sampler.uniforms`, computed where positions lie: nothing is copied and nothing waits for the device.

In torch's int64, whose sums and products wrap around, to the last bit on every device.

Legend: R rows.
"""

from __future__ import annotations

from torch import Tensor


def uniforms_at(states_R: Tensor, positions_R: Tensor) -> Tensor:
    """Float64 [R] in [0, 1): the chain of `sampler.row_state`, continued at int64 positions."""
    return _shifted(_mix(states_R ^ positions_R), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, as if without a sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
