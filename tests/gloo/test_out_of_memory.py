"""Memory that runs out: the error names the limit to lower, and with the value that it names the same work fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.engine import round_state
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.errors import CapacityError
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.records import Prompt, Rollout
from tests.gloo import jobs_scoring
from tests.gloo.jobs_generation import decode_round, new_rounds
from tests.gloo.models import CPU, world_groups
from tests.support.limits import room_for
from tests.support.ranks import run_ranks

TOLD = "[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
VOCAB = 100_000  # logits take more than the allocator keeps: they go back to the system when they are free
BIG = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip


def _advice(error: CapacityError, setting: str) -> int:
    found = re.search(rf"set {re.escape(setting)} to (\d+) or less", str(error))
    assert found is not None, error
    return int(found[1])


def _obey(work: Callable[[int], Any], value: int, setting: str) -> tuple[list[str], list[int], Any]:
    """`work(value)`, and with each error's advice until it fits: the errors, the values tried and the result."""
    errors, tried = [], [value]
    while len(tried) < 8:
        try:
            return errors, tried, work(tried[-1])
        except CapacityError as error:
            errors.append(str(error))
            tried.append(_advice(error, setting))
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
            jobs_scoring.together(models, 1, 1)
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
    ((errors, megabytes, same),) = run_ranks(
        1, "tests.gloo.test_out_of_memory:decoded_within", rooms=[200, 130, 90, 60], sync_steps=sync_steps
    )
    assert errors and "memory ran out in a decode step of 96 sequences" in errors[0]
    assert megabytes[0] == 48 and megabytes[1] == 24 and same


def test_prefill_names_its_role_and_limit(models: dict[str, str]) -> None:
    names = {"reward": models["qwen2-scalar"], "reference": models["llama"], "critic": models["qwen3-scalar"]}
    (error,) = run_ranks(1, "tests.gloo.test_out_of_memory:scored", models=names, most=5)
    assert "memory ran out in the " in error and " model's prefill of " in error, error
    assert "set runtime.micro_batch_tokens to " in error
    (error,) = run_ranks(1, "tests.gloo.test_out_of_memory:prefilled")
    assert "in the actor's prefill of 38 tokens (CUDA out of memory); set runtime.micro_batch_tokens to 19" in error
