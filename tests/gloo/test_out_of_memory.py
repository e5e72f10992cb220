"""Memory that runs out: the error names the limit to lower, and with the value that it names the same work fits."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks


@pytest.mark.parametrize("sync_steps", [1, 3])
def test_decoding_fits_with_the_limit_that_its_error_names(sync_steps: int) -> None:
    ((errors, megabytes, same),) = run_ranks(
        1, "tests.gloo.jobs_out_of_memory:decoded_within", rooms=[200, 130, 90, 60], sync_steps=sync_steps
    )
    assert errors and "memory ran out in a decode step of 96 sequences" in errors[0]
    assert megabytes[0] == 48 and megabytes[1] == 24 and same


def test_prefill_names_its_role_and_limit(models: dict[str, str]) -> None:
    names = {"reward": models["qwen2-scalar"], "reference": models["llama"], "critic": models["qwen3-scalar"]}
    (error,) = run_ranks(1, "tests.gloo.jobs_out_of_memory:scored", models=names, most=5)
    assert "memory ran out in the " in error and " model's prefill of " in error, error
    assert "set runtime.micro_batch_tokens to " in error
    (error,) = run_ranks(1, "tests.gloo.jobs_out_of_memory:prefilled")
    assert "in the actor's prefill of 38 tokens (CUDA out of memory); set runtime.micro_batch_tokens to 19" in error
