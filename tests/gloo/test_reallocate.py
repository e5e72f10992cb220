"""Weights moved to another layout equal, to the last bit, what loading them in that layout gives."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from oppo_megatron.config.model import ModelConfig, OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.mcore.batch import MicroBatch, pack_responses
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_training
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.hf_weights import export_weights
from oppo_megatron.mcore.weights.weight_sync import ROUND_BYTES, MoveReport, Reallocation, share_parameters
from tests.gloo.models import CPU, MAX_LENGTH, load, save_small
from tests.support.ranks import run_ranks

Layout = tuple[int, int]


def head_of(directory: str) -> Any:
    return "scalar" if "scalar" in directory else "lm"


def two_layouts(
    train: Layout, serve: Layout, ranks: list[int] | None = None, ep: int = 1
) -> tuple[RoleGroups, RoleGroups] | None:
    """Groups of both layouts over `ranks` (default: all); None on a rank that is not among them."""
    ranks = list(range(dist.get_world_size())) if ranks is None else ranks
    built = [build_groups(ranks, *layout, name, ep=of) for layout, name, of in ((train, "train", ep), (serve, "serve", 1))]
    return (built[0], built[1]) if built[0] is not None and built[1] is not None else None


def trainable(directory: str, groups: RoleGroups, layout: TrainingLayoutConfig, dtype: str = "float32") -> list[RoleModel]:
    config = ModelConfig(checkpoint=Path(directory), dtype=dtype)
    made: dict[str, Any] = {"head": head_of(directory), "max_length": MAX_LENGTH, "device": CPU, "vocab_multiple": 4}
    return load_training(config, layout, groups, role="model", **made)


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


def moved_and_written(directory: str, target: str, train: Layout, serve: Layout, ep: int) -> tuple[list[str], int]:
    """The experts are untrained, and `ep` replicas divide them."""
    groups = two_layouts(train, serve, ep=ep)
    assert groups is not None
    export_weights(trainable(directory, groups[0], TrainingLayoutConfig(ep=ep)), Path(target))
    return _move(directory, groups, ROUND_BYTES, 1, "float32")


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

    def loss(batch: MicroBatch, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if model.head == "scalar":
            return ((output - 1) ** 2).mean(), {}
        return -output.figures(batch.targets_R).logp_R.mean(), {}

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


JOBS = "tests.gloo.test_reallocate:"
NAMES = ("qwen2", "qwen3", "qwen3-scalar")
"""Tied embeddings and biases; norms of queries and keys; a scalar head."""

# (tp, pp) of training and of serving; the replicas are what is left of the ranks.
PAIRS_OF_2 = [(a, b) for a, b in itertools.permutations([(2, 1), (1, 2), (1, 1)], 2)]
PAIRS_OF_4 = [
    ((1, 2), (2, 1)),  # PP2 x DP2 -> TP2 x DP2
    ((2, 2), (1, 1)),  # -> DP4
    ((1, 1), (2, 2)),
    ((4, 1), (1, 4)),
    ((1, 4), (2, 2)),
    ((2, 1), (4, 1)),  # TP2 x DP2 -> TP4
]


def check(answers: list[Any]) -> int:
    assert [wrong for wrong, _ in answers] == [[]] * len(answers)
    (num_bytes,) = {num for _, num in answers}
    return num_bytes


@pytest.mark.parametrize(("world", "pair", "name"), [
    pytest.param(world, pair, name, marks=[] if NAMES.index(name) == number % 3 else [pytest.mark.long])
    for world, pairs in ((2, PAIRS_OF_2), (4, PAIRS_OF_4))
    for number, pair in enumerate(pairs)
    for name in NAMES
], ids=str)  # fmt: skip
def test_another_layout(models: dict[str, str], world: int, pair: Any, name: str) -> None:
    train, serve = pair
    check(run_ranks(world, f"{JOBS}move", directory=models[name], train=train, serve=serve))


@pytest.mark.parametrize(("name", "train", "serve", "ep"), [
    ("qwen3-moe", (2, 1), (1, 1), 2), pytest.param("qwen3-moe", (1, 1), (2, 2), 4, marks=pytest.mark.long),
    ("qwen3-moe", (1, 2), (1, 2), 2), pytest.param("qwen3-moe", (1, 1), (1, 1), 2, marks=pytest.mark.long),
    ("gpt-oss", (1, 1), (1, 1), 2),
], ids=str)  # fmt: skip
def test_experts_that_replicas_divide(models: dict[str, str], tmp_path: Path, name: str, train: Any, serve: Any, ep: int) -> None:
    """They move, and what is written of them is what was read, to the bit."""
    job: dict[str, Any] = dict(directory=models[name], target=str(tmp_path), train=train, serve=serve, ep=ep)
    assert check(run_ranks(4, f"{JOBS}moved_and_written", **job)) > 0
    read, written = (AutoModelForCausalLM.from_pretrained(x, dtype="auto").state_dict() for x in (job["directory"], tmp_path))
    assert read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read)


@pytest.mark.parametrize("train,serve", [((4, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 2), (4, 1))], ids=str)
def test_a_vocabulary_that_tensor_ranks_do_not_divide(tmp_path: Path, train: Any, serve: Any) -> None:
    save_small(tmp_path, "qwen2", vocab_size=61, tie_word_embeddings=serve == (1, 1))
    check(run_ranks(4, f"{JOBS}move", directory=str(tmp_path), train=train, serve=serve))


@pytest.mark.parametrize(("serve", "name"), list(zip([(2, 1), (1, 1), (1, 2)], NAMES, strict=True)), ids=str)
def test_chunks_of_virtual_stages(models: dict[str, str], name: str, serve: Any) -> None:
    check(run_ranks(2, f"{JOBS}move", directory=models[name], train=(1, 2), serve=serve, vpp=2))


def test_rounds_of_any_size_carry_the_same(models: dict[str, str]) -> None:
    job: dict[str, Any] = dict(directory=models["qwen2"], train=(2, 2), serve=(1, 1))
    whole, *cut = (check(run_ranks(4, f"{JOBS}move", **job, **more)) for more in ({}, {"round_bytes": 1}, {"round_bytes": 5000}))
    assert cut == [whole] * 2


def test_bytes_are_those_that_change_rank(models: dict[str, str]) -> None:
    """Counted by hand: a shard lacks half of the sharded weights, a stage half of all of them, a replica nothing."""
    sharded = replicated = 0
    with safe_open(Path(models["qwen3"]) / "model.safetensors", "pt") as file:
        for name in file.keys():
            size = 4 * file.get_tensor(name).numel()
            sharded, replicated = (sharded, replicated + size) if "norm" in name else (sharded + size, replicated)

    def moved(train: tuple[int, int], serve: tuple[int, int], world: int = 2, **more: str) -> int:
        return check(run_ranks(world, f"{JOBS}move", directory=models["qwen3"], train=train, serve=serve, **more))

    assert moved((2, 1), (1, 1)) == sharded and moved((1, 1), (2, 1)) == moved((1, 1), (2, 2), world=4) == 0
    assert moved((1, 2), (1, 1)) == sharded + replicated
    assert moved((1, 2), (2, 1)) == sharded // 2 + replicated == 2 * moved((1, 2), (2, 1), dtype="bfloat16")


@pytest.mark.parametrize("share_last", [True, False], ids=["share-after-ddp", "share-before-ddp"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_the_same_layout_is_one_set_of_weights(models: dict[str, str], layout: Any, share_last: bool) -> None:
    job: dict[str, Any] = dict(directory=models["qwen2"], layout=layout, share_last=share_last)
    assert run_ranks(2, f"{JOBS}same_layout", **job) == [True, True]


TRAINED = {
    "tp2-sp-to-pp2": (2, (2, 1), (1, 2), TrainingLayoutConfig(sequence_parallel=True)),
    "vpp2-to-tp2": (2, (1, 2), (2, 1), TrainingLayoutConfig(vpp=2)), "dp2-to-tp2": (2, (1, 1), (2, 1), TrainingLayoutConfig()),
    "dp2-to-pp2": (2, (1, 1), (1, 2), TrainingLayoutConfig()),
    "tp2-pp2-to-dp4": (4, (2, 2), (1, 1), TrainingLayoutConfig(recompute="full")),
    "pp2-dp2-to-tp2-dp2": (4, (1, 2), (2, 1), TrainingLayoutConfig()),
}  # fmt: skip


@pytest.mark.parametrize(("case", "name"), [
    pytest.param(case, name, marks=[] if number % 2 == other else [pytest.mark.long])
    for number, case in enumerate(TRAINED)
    for other, name in enumerate(("qwen2", "qwen3-scalar"))
])  # fmt: skip
def test_after_optimizer_steps(models: dict[str, str], tmp_path: Path, name: str, case: str) -> None:
    world, train, serve, layout = TRAINED[case]
    job: dict[str, Any] = dict(directory=models[name], target=str(tmp_path), train=train, serve=serve, layout=layout)
    assert run_ranks(world, f"{JOBS}after_steps", **job) == [[]] * world


def test_other_ranks_take_no_part(models: dict[str, str], tmp_path: Path) -> None:
    job: dict[str, Any] = dict(directory=models["qwen3"], folder=str(tmp_path), train=(2, 1), serve=(1, 2))
    first, *inner, last = run_ranks(4, f"{JOBS}on_inner_ranks", timeout_s=60, **job)
    assert first is None and last is None
    check(inner)
