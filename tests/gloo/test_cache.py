"""Ragged decode and chunked prefill from the cache equal the full forward."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

TOLERANCE = 1e-5
NUM_STEPS = 40
DIFFERENT, ALIKE = ("qwen2", "mistral", "qwen3-scalar"), ("qwen3", "llama")
"""Models; of those that are alike each is tested on parallel groups at length alone."""


@pytest.mark.parametrize(
    ("tp", "pp", "names"),
    [
        pytest.param(1, 1, DIFFERENT + ALIKE, id="tp1-pp1"),
        pytest.param(2, 1, DIFFERENT[:1], id="tp2-pp1"),
        pytest.param(1, 2, DIFFERENT, id="tp1-pp2"),
        pytest.param(2, 1, DIFFERENT[1:] + ALIKE, id="tp2-pp1-others", marks=pytest.mark.long),
        pytest.param(1, 2, ALIKE, id="tp1-pp2-others", marks=pytest.mark.long),
        pytest.param(2, 2, DIFFERENT + ALIKE, id="tp2-pp2", marks=pytest.mark.long),
    ],
)
def test_cached_steps_equal_the_full_forward(models: dict[str, str], tp: int, pp: int, names: tuple[str, ...]) -> None:
    chosen = {name: models[name] for name in names}
    answers = run_ranks(
        tp * pp, "tests.gloo.jobs_cache:cached_against_full", directories=chosen, tp=tp, pp=pp, num_steps=NUM_STEPS
    )
    speakers = [answer for answer in answers if "error" in answer[f"{names[0]}/fused"]]
    assert len(speakers) == tp  # the last stage
    for answer in speakers:
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["spread"] > 0.3 and report["rolled_back"] > 3 and report["opened"] > 8, (name, report)
            assert (report["fused_calls"] > 0) != name.endswith("/module"), (name, report)
