"""Running unit steps through the pipeline stages of one role.

Legend: T packed tokens of a call, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.stage import step


@dataclass
class StageCall:
    """One unit step: sequence `seq_ids[s]` grows by `lens[s]` of `tokens`; `rows` are the packed rows wanted (null: all)."""

    seq_ids: list[int]
    lens: list[int]
    tokens: list[int]
    rows: list[int] | None = None


class StageRunner:
    """Feeds calls through this rank's stage: receives hidden states from the stage before, sends them to the stage after.

    All ranks of the role make the same calls in the same order, so shapes need not be sent.  Sends are asynchronous: stage p
    works on call j while stage p + 1 works on call j - 1, and a blocking send could wait for a peer that waits for us.
    """

    def __init__(self, model: RoleModel, cache: KVCache):
        self.model, self.cache = model, cache
        self._weight = next(model.parameters())

    def run(self, calls: Sequence[StageCall]) -> list[Tensor]:
        """Outputs of the calls in order on the last stage, [] on the others."""
        groups, device = self.model.groups, self._weight.device
        link = groups.collection.pp
        outputs, sends = [], []
        for call in calls:
            if groups.is_first_stage:
                inputs = torch.tensor(call.tokens, dtype=torch.int64, device=device)
            else:
                hidden = self.model.shape.hidden_size
                inputs = torch.empty(len(call.tokens), 1, hidden, dtype=self._weight.dtype, device=device)
                dist.recv(inputs, groups.stage_rank(groups.pp_rank - 1), group=link)
            rows_R = None if call.rows is None else torch.tensor(call.rows, dtype=torch.int64, device=device)
            out = step(self.model, self.cache, call.seq_ids, call.lens, inputs, rows_R)
            if groups.is_last_stage:
                outputs.append(out)
            else:
                out = out.contiguous()
                sends.append((dist.isend(out, groups.stage_rank(groups.pp_rank + 1), group=link), out))
        for send, _ in sends:  # each beside its tensor, which must live until it has left
            if send is not None:
                send.wait()
        return outputs
