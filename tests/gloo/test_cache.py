"""Ragged decode and chunked prefill from the cache equal the full forward."""

from __future__ import annotations

from tests.support.ranks import run_ranks

TOLERANCE = 1e-5
NUM_STEPS = 40


def test_cached_steps_equal_the_full_forward(models: dict[str, str], layout: tuple[int, int]) -> None:
    tp, pp = layout
    chosen = {name: models[name] for name in ("qwen2", "qwen3", "llama", "mistral", "qwen3-scalar")}
    answers = run_ranks(
        tp * pp, "tests.gloo.jobs_cache:cached_against_full", directories=chosen, tp=tp, pp=pp, num_steps=NUM_STEPS
    )
    speakers = [answer for answer in answers if "error" in answer["qwen2/fused"]]
    assert len(speakers) == tp  # the last stage
    for answer in speakers:
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["spread"] > 0.3 and report["rolled_back"] > 3 and report["opened"] > 8, (name, report)
            assert (report["fused_calls"] > 0) != name.endswith("/module"), (name, report)
