"""Memory: the arithmetic of --dry-run against built models; where it runs out, the limit that the error names makes work fit."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.cli.launch import launch
from oppo_megatron.config.model import ModelConfig, ParallelConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine import round_state
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import CapacityError, OppoError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.memory import stage_layers, stage_parameters
from oppo_megatron.layout.shape import ModelShape, kv_bytes_per_token
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import RoleModel, build_chunks, build_model, step
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.directory import RunDirectory
from tests.gloo.models import CPU, world_groups
from tests.gloo.test_generation import decode_round, new_rounds
from tests.gloo.test_scoring import together
from tests.support.hf import tiny_config
from tests.support.ppo import SHAPE, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.processes import room_for
from tests.support.ranks import run_ranks

JOBS = "tests.gloo.test_memory:"
Count = tuple[int, int, list[int], int]
"""(stage, parameters, numbers of the layers, bytes of a KV cache of 3 slots)"""


def counts(cases: list[tuple[dict[str, Any], Head]], tp: int, pp: int, vpp: int) -> list[Count]:
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model")
    assert groups is not None
    found = []
    for hf_config, head in cases:
        made: dict[str, Any] = {"head": head, "max_length": 16, "dtype": "float32", "device": torch.device("cpu")}
        shape = ModelShape.from_hf(hf_config)
        chunks = build_chunks(shape, groups, TrainingLayoutConfig(vpp=vpp), **made)
        number = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        layers = [layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers]
        cache = build_model(shape, groups, **made).new_cache(3)
        found.append((groups.pp_rank, number, layers, sum(t.nbytes for t in (*cache.k, *cache.v))))
    return found


CASES: list[tuple[dict[str, Any], str]] = [
    (tiny_config(family, tie_word_embeddings=tied).to_dict(), head)
    for family in ("llama", "qwen2", "qwen3")
    for tied in (False, True)
    for head in ("lm", "scalar")
]


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_counts_equal_those_of_the_real_model(tp: int, pp: int, vpp: int) -> None:
    for rank_counts in run_ranks(tp * pp, f"{JOBS}counts", cases=CASES, tp=tp, pp=pp, vpp=vpp):
        for (shape, head), (stage, parameters, layers, cache) in zip(CASES, rank_counts, strict=True):
            assert parameters == stage_parameters(shape, tp, pp, stage, scalar=head == "scalar"), (shape, head, stage)
            assert layers == [layer for chunk in stage_layers(shape, pp, stage, vpp) for layer in chunk]
            layout = ParallelConfig(tp=tp, pp=pp)
            assert cache == 3 * 16 * kv_bytes_per_token(shape, layout, "float32")


TOLD = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
VOCAB = 100_000  # logits take more than the allocator keeps: they go back to the system when they are free
BIG = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip


def _obey(work: Callable[[int], Any], value: int, setting: str) -> tuple[list[str], list[int], Any]:
    """`work(value)`, and with each error's advice until it fits: the errors, the values tried and the result."""
    errors, tried = [], [value]
    while len(tried) < 8:
        try:
            return errors, tried, work(tried[-1])
        except CapacityError as error:
            errors.append(str(error))
            found = re.search(rf"set {re.escape(setting)} to (\d+) or less", str(error))
            assert found is not None, error
            tried.append(int(found[1]))
    raise AssertionError(errors)


def decoded_within(rooms: list[int], sync_steps: int) -> tuple[list[str], list[int], bool]:
    """Decoding in the first of `rooms` (MiB) that is too small: errors, MiB of the cache, and whether the tokens are the same."""
    shape = BIG | {"vocab_size": 4 * VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    model = load_role(ModelConfig(init=shape), world_groups(1, 1), head="lm", max_length=8192, device=CPU)

    def work(room: int | None, megabytes: int) -> list[list[int]]:
        cache = model.new_cache(96, megabytes * 2**20)
        rounds = new_rounds(model, cache, Sampling(seed=4), Stopping((), 3), tokens=64, sync_steps=sync_steps)
        rollouts = [Rollout(Prompt(i, i, "", (i, 7)), i) for i in range(96)]
        with nullcontext() if room is None else room_for(room):
            while any(not rollout.finished for rollout in rollouts):
                decode_round(rounds, [rollout for rollout in rollouts if not rollout.finished], 3, 0, 0)
        return [rollout.tokens for rollout in rollouts]

    whole = 96 * 2 * 2 * 4 * 4 * 8192 // 2**20  # slots, keys and values, groups, dimensions, bytes
    plain = work(None, whole)
    for room in rooms:
        errors, sizes, tokens = _obey(partial(work, room), whole, "runtime.kv_cache_mb")
        if errors:
            break
    return errors, sizes, tokens == plain


def scored(models: dict[str, str], most: int) -> str:
    def failing(model: RoleModel, kv: Any, seq_ids: Any, lens: Sequence[int], *rest: Any) -> Tensor:
        if sum(lens) > most:
            raise RuntimeError(TOLD)
        return step(model, kv, seq_ids, lens, *rest)

    with mock.patch.object(round_state, "step", failing):
        try:
            together(models, 1, 1)
        except CapacityError as error:
            return str(error)
    return "none"


def prefilled() -> str:
    model = load_role(ModelConfig(init=BIG), world_groups(1, 1), head="lm", max_length=64, device=CPU)
    rounds = new_rounds(model, model.new_cache(4), Sampling(seed=4), Stopping((), 3), tokens=64)
    with mock.patch.object(round_state, "step", side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried")):
        try:
            decode_round(rounds, [Rollout(Prompt(i, i, "", tuple(range(9 + i))), i) for i in range(4)], 3, 0, 0)
        except CapacityError as error:
            return str(error)
    return "none"


@pytest.mark.parametrize("sync_steps", [1, 3])
def test_decoding_fits_with_the_limit_that_its_error_names(sync_steps: int) -> None:
    ((errors, megabytes, same),) = run_ranks(1, f"{JOBS}decoded_within", rooms=[200, 130, 90, 60], sync_steps=sync_steps)
    assert errors and "memory ran out in a decode step of 96 sequences" in errors[0]
    assert megabytes[0] == 48 and megabytes[1] == 24 and same


def test_prefill_names_its_role_and_limit(models: dict[str, str]) -> None:
    names = {"reward": models["qwen2-scalar"], "reference": models["llama"], "critic": models["qwen3-scalar"]}
    (error,) = run_ranks(1, f"{JOBS}scored", models=names, most=5)
    assert "memory ran out in the " in error and " model's prefill of " in error, error
    assert "set runtime.micro_batch_tokens to " in error
    (error,) = run_ranks(1, f"{JOBS}prefilled")
    assert "in the actor's prefill of 38 tokens (CUDA out of memory); set runtime.micro_batch_tokens to 19" in error


WIDE = SHAPE | {"vocab_size": 320_000}
SETTINGS = {
    "actor": {"init": WIDE, "optimizer": {"lr": 2e-3, "eps": 1e-4}},
    "critic": {"init": WIDE, "optimizer": {"lr": 2e-3, "eps": 1e-4}}, "reward": {"init": WIDE}, "steps": 2,
    "rollout": {"batch_size": 16, "max_response_tokens": 24, "top_k": 6}, "ppo": {"epochs": 1, "minibatches": 1},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("layout", "mebibytes"), [({}, 30), ({"tp": 2}, 10)], ids=["one rank", "tensor parallel"])
def test_a_run_ends_with_the_limit_to_lower_and_resumes_with_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], mebibytes: int
) -> None:
    monkeypatch.setenv("BOUND_MB", str(mebibytes))
    ranks, placement = (2, {"mode": "colocated", "actor": layout}) if layout else (1, {"mode": "single"})
    changes = SETTINGS | {"placement": placement}
    plain = run_ppo_ranks(workspace.config(f"plain-{ranks}", **changes))
    config = TrainConfig(**workspace.config(f"short-{ranks}", **changes, checkpoint={"every_steps": 1}))
    told = ""
    try:
        launch("train", config, ranks, entry="tests.e2e.jobs:run_rank_within")
    except OppoError as error:
        told = str(error)
    found = re.search(r"memory ran out in a training micro-batch of .*; set runtime.micro_batch_tokens to (\d+) or less", told)
    assert found is not None and (ranks == 1 or told.startswith("rank 1: ")), told
    run = RunDirectory(config.run_dir)
    assert [position.step for position in CheckpointStore(run.path / "checkpoints").positions()] == [1]
    runtime = config.runtime.model_copy(update={"micro_batch_tokens": int(found[1])})
    assert launch("train", config.model_copy(update={"runtime": runtime}).resumed(), ranks) == 0
    outcome = read_outcome(run.path)
    assert outcome.tokens() == plain.tokens() and outcome.batches() == plain.batches()
    assert weight_distance(outcome.actor, plain.actor) < 1e-5 and weight_distance(outcome.critic, plain.critic) < 1e-5
