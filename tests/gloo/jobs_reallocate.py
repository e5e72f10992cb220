"""Weights carried from a training layout to a serving layout, on this job's ranks.
A layout is (tp, pp); the replicas are what is left of the ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.config.model import ModelConfig, OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.mcore.batch import MicroBatch, pack_responses
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.vocab import token_logprobs
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.mcore.weights.weight_sync import ROUND_BYTES, MoveReport, Reallocation, share_parameters
from tests.gloo.models import CPU, MAX_LENGTH, load

Layout = tuple[int, int]


def head_of(directory: str) -> Any:
    return "scalar" if "scalar" in directory else "lm"


def two_layouts(train: Layout, serve: Layout, ranks: list[int] | None = None) -> tuple[RoleGroups, RoleGroups] | None:
    """Groups of both layouts over `ranks` (default: all); None on a rank that is not among them."""
    ranks = list(range(dist.get_world_size())) if ranks is None else ranks
    built = [build_groups(ranks, *layout, name) for layout, name in ((train, "train"), (serve, "serve"))]
    return (built[0], built[1]) if built[0] is not None and built[1] is not None else None


def trainable(directory: str, groups: RoleGroups, layout: TrainingLayoutConfig, dtype: str = "float32") -> list[RoleModel]:
    config = ModelConfig(checkpoint=Path(directory), dtype=dtype)
    return load_training(
        config, layout, groups, head=head_of(directory), role="model", max_length=MAX_LENGTH, device=CPU, vocab_multiple=4
    )


def unset(directory: str, groups: RoleGroups, dtype: str = "float32") -> RoleModel:
    """A serving model in which a parameter that nobody fills stays NaN."""
    model = load(directory, groups, head_of(directory), dtype=dtype, vocab_multiple=4)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    return model


def differing(model: RoleModel, expected: RoleModel) -> list[str]:
    theirs = dict(expected.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    return [name for name, p in model.named_parameters() if not torch.equal(p, theirs[name])]


def move(
    directory: str, train: Layout, serve: Layout, round_bytes: int = ROUND_BYTES, vpp: int = 1, dtype: str = "float32"
) -> tuple[list[str], int]:
    """Move twice, with weights changed in between.  What differs from loading in the serving layout; bytes of a move."""
    groups = two_layouts(train, serve)
    assert groups is not None
    return _move(directory, groups, round_bytes, vpp, dtype)


def _move(directory: str, groups: tuple[RoleGroups, RoleGroups], round_bytes: int, vpp: int, dtype: str) -> tuple[list[str], int]:
    chunks = trainable(directory, groups[0], TrainingLayoutConfig(vpp=vpp), dtype)
    serving, expected = (
        unset(directory, groups[1], dtype),
        load(directory, groups[1], head_of(directory), dtype=dtype, vocab_multiple=4),
    )
    addresses = [p.data_ptr() for p in serving.parameters()]
    reallocation = Reallocation(chunks, serving, round_bytes)
    first = reallocation.move()
    wrong = differing(serving, expected)
    with torch.no_grad():
        for param in (p for model in (*chunks, expected) for p in model.parameters()):
            param.mul_(1.1).add_(0.01)  # element by element, hence to the same bits in every layout
    second = reallocation.move()
    wrong += differing(serving, expected)
    assert not reallocation.shared and first.bytes_moved == second.bytes_moved and second.seconds > 0
    assert addresses == [p.data_ptr() for p in serving.parameters()], "what decodes may have recorded the addresses"
    return wrong, first.bytes_moved


def same_layout(directory: str, layout: Layout, share_last: bool) -> bool:
    """Whether all weights changed in a second model over them; the trained one alone recomputes and is sequence parallel."""
    groups = two_layouts(layout, layout)
    assert groups is not None
    options = TrainingLayoutConfig(sequence_parallel=True, recompute="full")
    chunks, serving = trainable(directory, groups[0], options), unset(directory, groups[1])
    before = load(directory, groups[1], head_of(directory), vocab_multiple=4)
    if share_last:
        trained, reallocation = train_on(chunks, options), Reallocation(chunks, serving)
    else:
        reallocation, trained = Reallocation(chunks, serving), train_on(chunks, options)
    assert not differing(serving, before)
    step(trained)
    assert reallocation.shared and reallocation.move() == MoveReport(0, 0.0)
    pairs = zip(chunks[0].parameters(), serving.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    share_parameters(chunks[0], chunks[0])  # a role that has one model only
    return len(differing(serving, before)) == len(list(serving.parameters()))


def train_on(chunks: list[RoleModel], layout: TrainingLayoutConfig) -> TrainedModel:
    return TrainedModel(chunks, OptimizerConfig(lr=0.01, weight_decay=0.1), total_steps=2, layout=layout)


def step(trained: TrainedModel) -> None:
    """One optimizer step that makes some tokens likelier, or pulls scores towards 1; the vocabulary is all in it."""
    model, tokens = trained.model, list(range(1, 64))
    batches = pack_responses([[3, 5, 8], [1], [7, 9]], [tokens[:20], tokens[20:40], tokens[40:]], 30, CPU)

    def loss(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if model.head == "scalar":
            return ((output - 1) ** 2).mean(), {}
        return -token_logprobs(output, batch.targets_R, model.vocab, 1.0)[0].mean(), {}

    trained.step(batches, loss)


def after_steps(directory: str, target: str, train: Layout, serve: Layout, layout: TrainingLayoutConfig) -> list[str]:
    groups = two_layouts(train, serve)
    assert groups is not None
    head = head_of(directory)
    old, serving = load(directory, groups[1], head, vocab_multiple=4), unset(directory, groups[1])
    chunks = trainable(directory, groups[0], layout)
    trained, reallocation = train_on(chunks, layout), Reallocation(chunks, serving)
    wrong = []
    for count in range(2):
        step(trained)
        reallocation.move()
        for param in (param for chunk in chunks for param in chunk.parameters()):
            replicas = [torch.empty_like(param) for _ in range(groups[0].dp)]
            dist.all_gather(replicas, param.detach(), group=groups[0].collection.dp)
            assert all(torch.equal(param, other) for other in replicas)
        folder = Path(target) / str(count)
        export_weights(chunks, folder)
        wrong += differing(serving, load(str(folder), groups[1], head, vocab_multiple=4))
        assert len(differing(serving, old)) == len(list(serving.parameters())), "every weight was updated"
    return wrong


def on_inner_ranks(directory: str, folder: str, train: Layout, serve: Layout) -> tuple[list[str], int] | None:
    """The role is on ranks 1 and 2.  Ranks 0 and 3 enter nothing of the world before its moves are over."""
    others = dist.new_group([0, 3])
    groups, done = two_layouts(train, serve, [1, 2]), Path(folder)
    if groups is not None:
        answer = _move(directory, groups, ROUND_BYTES, 1, "float32")
        (done / str(dist.get_rank())).touch()
        return answer
    over = torch.zeros(())
    while not over:
        time.sleep(0.01)
        over.fill_(float(len(list(done.iterdir())) == 2))
        dist.all_reduce(over, dist.ReduceOp.MIN, group=others)
    return None
