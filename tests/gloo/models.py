"""Models on this job's ranks, calls from one pipeline stage to the next, and the full forward as the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import DecodePath, RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.vocab import OutputRows, VocabShards
from tests.support.hf import tiny_model

CPU = torch.device("cpu")
MAX_LENGTH = 32
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PATHS: tuple[DecodePath, ...] = ("packed", "fused", "module")


def save_small(directory: Path, family: str, head: str = "lm", **changes: Any) -> None:
    """Weights of a size that keeps logits near 1, so that a tolerance of 1e-5 is about arithmetic and not about scale."""
    model = tiny_model(family, head, **changes)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(0.6)
    model.save_pretrained(directory)


def gather_logits(logits_RV: Tensor, vocab: VocabShards) -> Tensor:
    if vocab.size == 1:
        return logits_RV
    return torch.cat(list(vocab.gather(vocab.filled_up(logits_RV))), dim=-1)[:, : vocab.vocab_size]


def whole_logits(output: OutputRows, num_rows: int | None = None) -> Tensor:
    """Logits [R, V / tp] of an output, all at once; `num_rows`: of all ranks that share sequences."""
    targets_R = torch.zeros(len(output.hidden_RH) if num_rows is None else num_rows, dtype=torch.int64)
    return output.by_rows(lambda logits_BV, _: logits_BV, targets_R)


def world_groups(tp: int, pp: int, cp: int = 1, ep: int = 1) -> RoleGroups:
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model", cp=cp, ep=ep)
    assert groups is not None
    return groups


def load(
    directory: str, groups: RoleGroups, head: Head = "lm", *, path: DecodePath = "packed", dtype: str = "float32",
    vocab_multiple: int = 1,
) -> RoleModel:  # fmt: skip
    config = ModelConfig(checkpoint=Path(directory), dtype=dtype)
    sizes = {"max_length": MAX_LENGTH, "vocab_multiple": vocab_multiple}
    return load_role(config, groups, head=head, role="critic" if head == "scalar" else "actor", device=CPU, path=path, **sizes)


@dataclass
class Whole:
    tokens: list[int]
    positions: list[int]


def micro_batches(sequences: Sequence[Whole], size: int = 8) -> list[MicroBatch]:
    batches = []
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        lengths = [len(s.tokens) for s in part]
        rows = [sum(lengths[:k]) + position for k, s in enumerate(part) for position in s.positions]
        tokens_T = torch.tensor([t for s in part for t in s.tokens])
        targets_R = torch.zeros(len(rows), dtype=torch.int64)
        index = list(range(start, start + len(part)))
        batches.append(MicroBatch(index, lengths, tokens_T, torch.tensor(rows), targets_R, rows=rows))
    return batches


def full_outputs(model: RoleModel, sequences: Sequence[Whole]) -> Tensor | None:
    """Logits [R, V] or scalars [R] of the positions by the cache-free forward; None before the last stage."""

    def finish(_: MicroBatch, out: Any) -> Tensor:
        return gather_logits(whole_logits(out), model.vocab) if model.head == "lm" else out

    outputs = forward_rows(model, micro_batches(sequences), finish)
    return torch.cat(outputs) if model.groups.is_last_stage else None


def stage_inputs(model: RoleModel, tokens_T: Tensor) -> Tensor:
    """Inputs of this stage: the tokens on the first one, on others the hidden states of the one before, [T, 1, H]."""
    groups = model.groups
    if groups.pp_rank == 0:
        return tokens_T
    dtype = next(model.parameters()).dtype
    hidden = torch.empty(len(tokens_T), 1, model.shape.hidden_size, dtype=dtype)
    dist.recv(hidden, stage_rank(groups, groups.pp_rank - 1))
    return hidden


def pass_on(model: RoleModel, out: Tensor) -> None:
    if not model.groups.is_last_stage:
        dist.send(out.contiguous(), stage_rank(model.groups, model.groups.pp_rank + 1))


def stage_rank(groups: RoleGroups, pp_rank: int) -> int:
    return dist.get_global_rank(groups.collection.pp, pp_rank)
