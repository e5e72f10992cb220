"""Rotary position embedding tables (Su et al. 2021) for every position a model may see.

Shapes: L positions, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oppo_megatron.runtime.shape import ModelShape


def rope_tables(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_LD and sin_LD in float32.  Scaled kinds (linear, llama3, yarn) take their frequencies from transformers."""
    frequencies, factor = _frequencies(shape)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    angles_LD = torch.cat([angles, angles], dim=-1)
    return (angles_LD.cos() * factor).to(device), (angles_LD.sin() * factor).to(device)


def _frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / (float(shape.rope["rope_theta"]) ** exponents), 1.0
    config = AutoConfig.for_model(**dict(shape.hf))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def apply_rope(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate heads x_TND by the angles of their tokens' positions."""
    half = x_TND.shape[-1] // 2
    rotated = torch.cat((-x_TND[..., half:], x_TND[..., :half]), dim=-1)
    return x_TND * cos_TD.unsqueeze(-2) + rotated * sin_TD.unsqueeze(-2)
