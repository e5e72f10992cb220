"""Memory that runs out: less is done at once, and what comes of it is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.jobs_device_decode import Way
from tests.gloo.test_device_decode import COURSES, PLAIN
from tests.support.ranks import run_new_ranks, run_ranks

TOLERANCE = 1e-4


def test_rounds_are_the_same_where_decode_steps_are_made_in_pieces(models: dict[str, str]) -> None:
    """Calls that fail before they have cached anything, and when they have; steps on the device that are taken over."""
    courses, ways = COURSES[1:4], [PLAIN, Way(4), Way(3, "paged"), Way(1, "paged")]
    (answer,) = run_ranks(
        1, "tests.gloo.jobs_out_of_memory:decoded", directory=models["qwen2"], courses=courses, ways=ways
    )
    for course, found in zip(courses, answer, strict=True):
        rounds, logprobs = found[PLAIN]
        for way in found:
            assert found[way][0] == rounds, (course, way)
            assert found[way][1] == pytest.approx(logprobs, abs=TOLERANCE), (course, way)


@pytest.mark.parametrize("pp", [1, 2])
def test_scores_are_the_same_where_prefill_is_made_in_pieces(models: dict[str, str], pp: int) -> None:
    names = {"reward": models["qwen2-scalar"], "reference": models["llama"], "critic": models["qwen3-scalar"]}
    for errors in run_ranks(pp, "tests.gloo.jobs_out_of_memory:scored", models=names, pp=pp):
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize(
    ("rooms", "short"),
    [([375, 250, 180, 130], [0]), ([280, 187, 125], [1])],
    ids=["one rank", "one of two replicas"],
)
def test_an_update_without_enough_memory_is_the_same_update(rooms: list[int], short: list[int]) -> None:
    """For real: the process may not grow by what the budget's micro-batches take.

    What an earlier job had and freed would be room that differs from one update to the next.
    """
    answers: list[dict[str, Any]] = run_new_ranks(
        short[0] + 1,
        "tests.gloo.jobs_out_of_memory:trained_within",
        rooms=rooms,
        short_ranks=short,
    )
    for rank, answer in enumerate(answers):
        if rank in short:
            assert 40 <= answer["most"] <= 200 and answer["told"], "halved, as far as it had to be"
            assert "ran out of memory in a training micro-batch of" in answer["told"][0]
        else:
            assert answer["most"] is None and not answer["told"]
        assert answer["from the whole"] < 1e-6 < 1e-4 < answer["moved"]
        assert answer["grad_norm"][0] == pytest.approx(answer["grad_norm"][1], rel=1e-5)
        assert answer["as if it had been so"], "nothing is left of what did not fit"


def test_what_cannot_be_halved_is_told() -> None:
    ((alone,),) = run_ranks(1, "tests.gloo.jobs_out_of_memory:refused")
    assert "rank 0 has not enough memory for a training micro-batch of one sequence, 95 tokens long, alone" in alone
    assert "lower runtime.micro_batch_tokens, runtime.kv_cache_mb or rollout.max_response_tokens" in alone
    for tensor_parallel, overlapped in run_ranks(2, "tests.gloo.jobs_out_of_memory:refused"):
        assert "the other ranks of its tensor- or pipeline-parallel group compute the same" in tensor_parallel
        assert "gradients of its last micro-batch are on their way to other replicas" in overlapped


@pytest.mark.parametrize("sync_steps", [1, 3])
def test_fewer_sequences_are_decoded_at_once_where_memory_is_short(sync_steps: int) -> None:
    ((most, same, gap),) = run_ranks(
        1, "tests.gloo.jobs_out_of_memory:decoded_within", rooms=[200, 130, 90, 60], sync_steps=sync_steps
    )
    assert most in (48, 24, 12, 6) and same and gap < TOLERANCE
