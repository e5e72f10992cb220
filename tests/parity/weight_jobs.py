"""Jobs of each rank in the tests of weights and logits."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import RoleModel, build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import export_weights, load_weights
from tests.gloo.models import gather_logits, pass_on, stage_inputs


def build(directory: Path, tp: int, pp: int, head: Head, max_length: int = 64, dtype: str = "float32") -> RoleModel:
    shape, source = open_weights(ModelConfig(checkpoint=directory), head)
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model")
    assert groups is not None
    model = build_model(shape, groups, head=head, max_length=max_length, dtype=dtype, device=torch.device("cpu"))
    place = {"tp_rank": groups.tp_rank, "tp_size": tp, "pp_rank": groups.pp_rank, "pp_size": pp}
    load_weights(model, shape, source, head=head, **place)
    return model


def load_and_export(src: str, dst: str, tp: int, pp: int, head: Head) -> bool:
    """HF -> ranks -> HF.  Returns whether the directory was whole when this rank's call came back."""
    model = build(Path(src), tp, pp, head)
    export_weights(model, Path(dst), max_shard_bytes=20_000)
    return (Path(dst) / "config.json").is_file()


def full_logits(
    src: str, tp: int, pp: int, head: Head, sequences: list[list[int]], dtype: str = "float32"
) -> torch.Tensor | None:
    """Logits [T, V] or scalars [T] of packed whole sequences, on the role's output rank."""
    model = build(Path(src), tp, pp, head, max_length=max(map(len, sequences)), dtype=dtype)
    groups = model.groups
    plan = PackedPlan([len(tokens) for tokens in sequences], model.rope)
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    with torch.no_grad():
        inputs, first = stage_inputs(model, tokens_T), groups.pp_rank == 0
        if not first:
            model.set_input_tensor(inputs)
        out = model(tokens_T if first else None, plan)
        pass_on(model, out)
        if not groups.is_last_stage:
            return None
        if head == "lm":
            out = gather_logits(out, model.vocab)
    return out if dist.get_rank() == groups.output_rank else None
