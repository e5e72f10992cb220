"""Rotary position embedding tables (Su et al. 2021) for every position a model may see.

Shapes: L positions, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_megatron.layout.model_shape import ModelShape


def rope_tables(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_LD and sin_LD in float32, the sine negated in the first half of D, as `apply_rope` takes it.

    Scaled kinds (linear, llama3, yarn) take their frequencies from transformers.
    """
    frequencies, factor = _frequencies(shape)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def _frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / (float(shape.rope["rope_theta"]) ** exponents), 1.0
    # Most models need none of it, and to load the library takes a second.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**dict(shape.hf))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate heads by the angles of their tokens' positions: (a, b) -> (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x_TND * cos_T1D, x_TND.roll(x_TND.shape[-1] // 2, -1), sin_T1D)
