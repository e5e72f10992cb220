"""Weights moved to another layout equal, to the last bit, what loading them in that layout gives."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from oppo_megatron.config.model import TrainingLayoutConfig
from tests.gloo.conftest import save_small
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.jobs_reallocate:"
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


@pytest.mark.parametrize(
    ("world", "pair", "name"),
    [
        pytest.param(world, pair, name, marks=[] if NAMES.index(name) == number % 3 else [pytest.mark.long])
        for world, pairs in ((2, PAIRS_OF_2), (4, PAIRS_OF_4))
        for number, pair in enumerate(pairs)
        for name in NAMES
    ],
    ids=str,
)
def test_another_layout(models: dict[str, str], world: int, pair: Any, name: str) -> None:
    train, serve = pair
    check(run_ranks(world, f"{JOBS}move", directory=models[name], train=train, serve=serve))


@pytest.mark.parametrize("train,serve", [((4, 1), (2, 1)), ((2, 2), (1, 1)), ((1, 2), (4, 1))], ids=str)
def test_a_vocabulary_that_tensor_ranks_do_not_divide(tmp_path: Path, train: Any, serve: Any) -> None:
    save_small(tmp_path, "qwen2", vocab_size=61, tie_word_embeddings=serve == (1, 1))
    check(run_ranks(4, f"{JOBS}move", directory=str(tmp_path), train=train, serve=serve))


@pytest.mark.parametrize(("serve", "name"), list(zip([(2, 1), (1, 1), (1, 2)], NAMES, strict=True)), ids=str)
def test_chunks_of_virtual_stages(models: dict[str, str], name: str, serve: Any) -> None:
    check(run_ranks(2, f"{JOBS}move", directory=models[name], train=(1, 2), serve=serve, vpp=2))


@pytest.mark.parametrize("round_bytes", [1, 5000])
def test_rounds_of_any_size_carry_the_same(models: dict[str, str], round_bytes: int) -> None:
    job: dict[str, Any] = dict(directory=models["qwen2"], train=(2, 2), serve=(1, 1))
    whole, cut = (run_ranks(4, f"{JOBS}move", **job, **more) for more in ({}, {"round_bytes": round_bytes}))
    assert check(whole) == check(cut)


def test_bfloat16(models: dict[str, str]) -> None:
    job: dict[str, Any] = dict(directory=models["qwen2"], train=(2, 1), serve=(1, 2))
    full, half = (check(run_ranks(2, f"{JOBS}move", **job, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert full == 2 * half


def test_bytes_are_those_that_change_rank(models: dict[str, str]) -> None:
    """Counted by hand: a shard lacks half of the sharded weights, a stage half of all of them, a replica nothing."""
    sharded = replicated = 0
    with safe_open(Path(models["qwen3"]) / "model.safetensors", "pt") as file:
        for name in file.keys():
            size = 4 * file.get_tensor(name).numel()
            sharded, replicated = (sharded, replicated + size) if "norm" in name else (sharded + size, replicated)

    def moved(train: tuple[int, int], serve: tuple[int, int], world: int = 2) -> int:
        return check(run_ranks(world, f"{JOBS}move", directory=models["qwen3"], train=train, serve=serve))

    assert moved((2, 1), (1, 1)) == sharded
    assert moved((1, 1), (2, 1)) == moved((1, 1), (2, 2), world=4) == 0
    assert moved((1, 2), (1, 1)) == sharded + replicated
    assert moved((1, 2), (2, 1)) == sharded // 2 + replicated


@pytest.mark.parametrize("share_last", [True, False], ids=["share-after-ddp", "share-before-ddp"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_the_same_layout_is_one_set_of_weights(models: dict[str, str], layout: Any, share_last: bool) -> None:
    job: dict[str, Any] = dict(directory=models["qwen2"], layout=layout, share_last=share_last)
    assert run_ranks(2, f"{JOBS}same_layout", **job) == [True, True]


TRAINED = {
    "tp2-sp-to-pp2": (2, (2, 1), (1, 2), TrainingLayoutConfig(sequence_parallel=True)),
    "vpp2-to-tp2": (2, (1, 2), (2, 1), TrainingLayoutConfig(vpp=2)),
    "dp2-to-tp2": (2, (1, 1), (2, 1), TrainingLayoutConfig()),
    "dp2-to-pp2": (2, (1, 1), (1, 2), TrainingLayoutConfig()),
    "tp2-pp2-to-dp4": (4, (2, 2), (1, 1), TrainingLayoutConfig(recompute="full")),
    "pp2-dp2-to-tp2-dp2": (4, (1, 2), (2, 1), TrainingLayoutConfig()),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[] if number % 2 == other else [pytest.mark.long])
        for number, case in enumerate(TRAINED)
        for other, name in enumerate(("qwen2", "qwen3-scalar"))
    ],
)
def test_after_optimizer_steps(models: dict[str, str], tmp_path: Path, name: str, case: str) -> None:
    world, train, serve, layout = TRAINED[case]
    job: dict[str, Any] = dict(directory=models[name], target=str(tmp_path), train=train, serve=serve, layout=layout)
    assert run_ranks(world, f"{JOBS}after_steps", **job) == [[]] * world


def test_other_ranks_take_no_part(models: dict[str, str], tmp_path: Path) -> None:
    job: dict[str, Any] = dict(directory=models["qwen3"], folder=str(tmp_path), train=(2, 1), serve=(1, 2))
    first, *inner, last = run_ranks(4, f"{JOBS}on_inner_ranks", timeout_s=60, **job)
    assert first is None and last is None
    check(inner)
