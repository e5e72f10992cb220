"""Advances sequences by some tokens on one pipeline stage: the call of both actor decode and scorer prefill.

Legend: T packed tokens, H hidden, R rows of interest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel


@torch.inference_mode()
def step(
    model: RoleModel,
    kv: SequenceCache,
    seq_ids: Sequence[int],
    lens: Sequence[int],
    inputs: Tensor,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Append lens[s] tokens to each sequence's cache and return this stage's output.

    `inputs` are tokens [T] on the first stage and hidden states [T, 1, H] on the others.  The output is hidden [T, 1, H]
    before the last stage; there it is logits [R, V / tp] or values / scores [R] of `rows_R` (None: all T tokens).
    The only communication is megatron's tensor-parallel reductions.
    """
    plan = kv.begin(seq_ids, lens)
    if model.pre_process:
        out = model(inputs, plan, rows_R)
    else:
        model.set_input_tensor(inputs)
        out = model(None, plan, rows_R)
        model.set_input_tensor(None)  # release it
    kv.commit(plan)
    return out
