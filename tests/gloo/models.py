"""Models on this job's ranks, whole sequences, and the full forward as the oracle, for the jobs of several tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from oppo_megatron.mcore.vocab import VocabShards

CPU = torch.device("cpu")
MAX_LENGTH = 32


PATHS: tuple[DecodePath, ...] = ("packed", "fused", "module")


def gather_logits(logits_RV: Tensor, vocab: VocabShards) -> Tensor:
    if vocab.size == 1:
        return logits_RV
    return torch.cat(list(vocab.gather(vocab.filled_up(logits_RV))), dim=-1)[:, : vocab.vocab_size]


def world_groups(tp: int, pp: int) -> RoleGroups:
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model")
    assert groups is not None
    return groups


def load(
    directory: str,
    groups: RoleGroups,
    head: Head = "lm",
    *,
    path: DecodePath = "packed",
    dtype: str = "float32",
    vocab_multiple: int = 1,
) -> RoleModel:
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
        batches.append(MicroBatch(list(range(start, start + len(part))), lengths, tokens_T, torch.tensor(rows), targets_R))
    return batches


def full_outputs(model: RoleModel, sequences: Sequence[Whole]) -> Tensor | None:
    """Logits [R, V] or scalars [R] of the positions by the cache-free forward; None before the last stage."""

    def finish(_: MicroBatch, out: Tensor) -> Tensor:
        return gather_logits(out, model.vocab) if model.head == "lm" else out

    outputs = forward_rows(model, micro_batches(sequences), finish)
    return torch.cat(outputs) if model.groups.is_last_stage else None
