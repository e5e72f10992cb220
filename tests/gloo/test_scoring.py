"""Streamed rewards, reference log-probs and values equal those of the full-sequence forward."""

from __future__ import annotations

from tests.gloo.jobs_scoring import ROLES, SIZES
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5


def test_streamed_outputs_equal_the_full_forward(models: dict[str, str], layout: tuple[int, int]) -> None:
    tp, pp = layout
    chosen = {"reward": models["qwen2-scalar"], "reference": models["llama"], "critic": models["qwen3-scalar"]}
    answers = run_ranks(tp * pp, "tests.gloo.jobs_scoring:streamed_against_full", models=chosen, tp=tp, pp=pp)
    for answer in answers:
        assert set(answer) == {f"{role}/{slots}" for role in ROLES for slots in (len(SIZES), 3, 1)}
        for name, report in answer.items():
            assert report["error"] < TOLERANCE, (name, report)
            assert report["taken"] == 1
    # With too few slots sequences were evicted and seated again; with enough they were not.
    assert answers[0]["reward/3"]["opened"] > len(SIZES) + 1
    assert answers[0][f"reward/{len(SIZES)}"]["opened"] == len(SIZES) + 1
    assert max(answer["reference/3"]["error"] for answer in answers) > 0
