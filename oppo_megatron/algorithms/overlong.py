"""Responses near their limit, and those that were cut there (DAPO, arXiv 2503.14476).

Legend: B responses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oppo_megatron.config.filtering import OverlongConfig


@dataclass(frozen=True)
class Overlong:
    """The settings, and the limit that they are about: `longest`, in tokens of a response."""

    settings: OverlongConfig
    longest: int

    def penalties(self, lengths_B: Tensor) -> Tensor | float:
        """What is added to the scores: eq. 13, times `penalty`; [B], or 0 where there is no penalty.

        0 up to `longest - buffer` tokens, from there down to -1 at `longest`, and -1 beyond.
        """
        buffer = self.settings.buffer
        if buffer is None:
            return 0.0
        return self.settings.penalty * ((self.longest - buffer - lengths_B) / buffer).clamp(-1.0, 0.0)

    def counted(self, truncated_B: Tensor) -> Tensor | None:
        """Which responses the actor's loss counts (bool, [B]); None: all."""
        return ~truncated_B if self.settings.mask else None


NO_LIMIT = Overlong(OverlongConfig(), longest=0)
"""Nothing is said of long responses."""
